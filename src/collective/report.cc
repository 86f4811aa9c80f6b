// Texts of failures: the layer and the phase, who has arrived, who has not, and what to do.
#include "collective/report.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "collective/advice.h"
#include "core/error.h"

namespace syncbn {
namespace {

std::string Layer(const std::string& layer) { return Concat(TheAdvice().title, " '", layer, "'"); }

const char kCall[] = " Before the next step call ";
const char kEveryRankCalls[] = " Before the next step every rank calls ";
std::string Recover(const char* who_calls) {
  return Concat(who_calls, TheAdvice().recover,
                ", which waits for the work in flight and clears the error.");
}

std::string Rounded(double seconds) {
  std::ostringstream text;
  text << std::setprecision(4) << seconds;
  return text.str();
}

std::string Join(const std::vector<std::string>& parts, const char* separator = ", ") {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : separator) + part;
  return text;
}

}  // namespace

// ---- devices -----------------------------------------------------------------------------------

std::string Title(const std::string& layer, const std::string& phase) {
  return Concat(Layer(layer), ", ", phase);
}

std::string TimeoutReport(const std::string& title, const Rendezvous& rendezvous,
                          const Absence& absence, double seconds) {
  std::vector<std::string> arrived, missing;
  for (const auto& entry : rendezvous.arrivals) {
    arrived.push_back(entry.first.Name() + " with shape " + entry.second.shape);
  }
  if (!absence.missing.empty()) missing.push_back(Names(absence.missing));
  if (absence.unknown > 0) {
    missing.push_back(Concat(absence.unknown, missing.empty() ? " that never" : " more that never",
                             " called the layer"));
  }
  return Concat(title, ": waited ", Rounded(seconds), " s for ", absence.size - arrived.size(),
                " of ", absence.size, " devices. Arrived: ", Join(arrived), ". Missing: ",
                Join(missing), ". Likely cause: ", TheAdvice().likely_cause(absence), ".",
                Recover(kCall));
}

std::string DisagreementReport(const std::string& title, const Rendezvous& rendezvous,
                               const Device& device, const Arrival& arrival) {
  const auto& other = *rendezvous.arrivals.begin();
  return Concat(title, ": devices disagree: ", other.first.Name(), " has ",
                other.second.signature, " (shape ", other.second.shape, "), but ", device.Name(),
                " has ", arrival.signature, " (shape ", arrival.shape, ").", Recover(kCall));
}

std::string TooManyDevicesReport(const std::string& layer, const Device& device,
                                 const std::set<Device>& others, size_t size) {
  return Concat(Layer(layer), ": ", TheAdvice().size, "=", size, ", but ", device.Name(),
                " calls the layer as well as ", Names(others), "; ", TheAdvice().too_many_devices,
                ".", Recover(kCall));
}

std::string SitsOutReport(const std::string& layer, const Device& device,
                          const std::set<Device>& participants) {
  return Concat(Layer(layer), ": ", device.Name(), " calls the layer, but only ",
                Names(participants), " take part: ", TheAdvice().sits_out, ".", Recover(kCall));
}

std::string TwiceReport(const std::string& title, const Device& device) {
  return Concat(title, ": ", device.Name(), " arrived twice at one rendezvous; ",
                TheAdvice().twice, ".", Recover(kCall));
}

std::string EarlierFailureReport(const std::string& title, const Device& device,
                                 const std::string& failure) {
  return Concat(title, ": ", device.Name(), " stopped because of an earlier error: ", failure);
}

std::string WasResetReport() {
  return Concat("the layer was reset by ", TheAdvice().recover,
                " after the forward call that this call belongs to.");
}

// ---- processes ---------------------------------------------------------------------------------

std::string RankList(const std::vector<int>& ranks) {
  std::vector<std::string> numbers;
  for (int rank : ranks) numbers.push_back(std::to_string(rank));
  return (ranks.size() == 1 ? "rank " : "ranks ") + Join(numbers);
}

std::string RanksMissingReport(const Contribution& own, const std::vector<int>& arrived,
                               const std::map<int, Message>& answers, double seconds) {
  std::vector<int> present = arrived;
  std::vector<std::string> missing;
  for (int rank : own.ranks) {
    if (std::count(arrived.begin(), arrived.end(), rank)) continue;
    const auto answer = answers.find(rank);
    if (answer != answers.end() && answer->second.step == 1) {
      present.push_back(rank);
      continue;
    }
    missing.push_back(Concat("rank ", rank, ", which ",
                             answer == answers.end()
                                 ? "does not answer: it has died or was stopped"
                                 : answer->second.text));
  }
  std::sort(present.begin(), present.end());
  return Concat(own.title, ": waited ", Rounded(seconds), " s for ", missing.size(), " of ",
                own.ranks.size(), " processes. Arrived: ", RankList(present), ". Missing: ",
                Join(missing, "; "), ".", Recover(kEveryRankCalls));
}

std::string PartsMissingReport(const Contribution& own, double seconds) {
  return Concat(own.title, ": waited ", Rounded(seconds), " s for parts that do not arrive, though "
                "all ", own.ranks.size(), " processes have begun: the connection is lost, or "
                "slower than the timeout.", Recover(kEveryRankCalls));
}

std::string SignaturesDifferReport(const Contribution& own, int own_rank, int rank,
                                   const Message& message, const std::vector<int>& ranks) {
  return Concat(own.title, ": processes disagree: rank ", own_rank, " has ", own.signature,
                " (synchronized: ", RankList(own.ranks), "), but rank ", rank, " has ",
                message.signature, " (synchronized: ", RankList(ranks), ").",
                Recover(kEveryRankCalls));
}

std::string RankLeftReport(const std::string& title, int rank) {
  return Concat(title, ": rank ", rank, " has left: its program has ended or called ",
                TheAdvice().shutdown, ", so it cannot take part.");
}

std::string RankFailedReport(int rank, const std::string& text) {
  return Concat("ended because of an error on rank ", rank, ": ", text);
}

}  // namespace syncbn
