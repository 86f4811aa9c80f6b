// Texts of failed exchanges: the title, the ranks that have arrived, and what the others do.
#include "collective/process_report.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "collective/advice.h"
#include "core/error.h"

namespace syncbn {
namespace {

std::string Recover() {
  return Concat(" Before the next step every rank calls ", TheAdvice().recover,
                ", which waits for the work in flight and clears the error.");
}

std::string Rounded(double seconds) {
  std::ostringstream text;
  text << std::setprecision(4) << seconds;
  return text.str();
}

}  // namespace

std::string RankList(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

std::string RanksMissingReport(const Contribution& own, const std::vector<int>& arrived,
                               const std::map<int, Message>& answers, double seconds) {
  std::vector<int> present = arrived;
  std::string missing;
  size_t absent = 0;
  for (int rank : own.ranks) {
    if (std::count(arrived.begin(), arrived.end(), rank)) continue;
    const auto answer = answers.find(rank);
    if (answer != answers.end() && answer->second.step == 1) {
      present.push_back(rank);
      continue;
    }
    ++absent;
    missing += Concat(missing.empty() ? "" : "; ", "rank ", rank, ", which ",
                      answer == answers.end() ? "does not answer: it has died or was stopped"
                                              : answer->second.text);
  }
  std::sort(present.begin(), present.end());
  return Concat(own.title, ": waited ", Rounded(seconds), " s for ", absent, " of ",
                own.ranks.size(), " processes. Arrived: ", RankList(present), ". Missing: ",
                missing, ".", Recover());
}

std::string PartsMissingReport(const Contribution& own, double seconds) {
  return Concat(own.title, ": waited ", Rounded(seconds), " s for parts that do not arrive, though "
                "all ", own.ranks.size(), " processes have come: the connection is lost, or slower "
                "than the timeout.", Recover());
}

std::string SignaturesDifferReport(const Contribution& own, int own_rank, int rank,
                                   const Message& message, const std::vector<int>& ranks) {
  return Concat(own.title, ": processes disagree: rank ", own_rank, " has ", own.signature,
                " (synchronized: ", RankList(own.ranks), "), but rank ", rank, " has ",
                message.signature, " (synchronized: ", RankList(ranks), ").", Recover());
}

std::string RankLeftReport(const std::string& title, int rank) {
  return Concat(title, ": rank ", rank, " has left: its program has ended or called ",
                TheAdvice().shutdown, ", so it cannot come.");
}

std::string RankFailedReport(int rank, const std::string& text) {
  return Concat("ended because of an error on rank ", rank, ": ", text);
}

}  // namespace syncbn
