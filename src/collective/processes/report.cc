// Texts of failures: the exchange, which ranks have begun it, which have not, and what to do.
#include "collective/processes/report.h"

#include <iomanip>
#include <mutex>
#include <set>

#include "core/error.h"
#include "core/program.h"

namespace syncbn {
namespace {

const char kStartAgain[] = " The program has to be started again, from its checkpoint.";

std::mutex frozen_mutex;
auto& frozen_layers = *new std::set<std::string>;  // communicators outlive static destructors

// "ranks 0, 2"
std::string RankList(const std::vector<int>& ranks) {
  std::vector<std::string> numbers;
  for (int rank : ranks) numbers.push_back(std::to_string(rank));
  return (ranks.size() == 1 ? "rank " : "ranks ") + Join(numbers);
}

}  // namespace

std::string RanksMissingReport(const Agreement& own, const std::vector<int>& present,
                               const std::vector<std::string>& missing, double seconds) {
  return Concat(own.title, ": waited ", std::setprecision(4), seconds, " s for ", missing.size(),
                " of ", own.ranks.size(), " processes. Arrived: ",
                present.empty() ? "none" : RankList(present), ". Missing: ", Join(missing, "; "),
                ".", kStartAgain, WhereProgramStands());
}

std::string SignaturesDifferReport(const Agreement& own, int own_rank, const Agreement& other,
                                   int other_rank) {
  return Concat(own.title, ": processes disagree: rank ", own_rank, " has ", own.signature,
                " (synchronized: ", RankList(own.ranks), "), but rank ", other_rank, " has ",
                other.signature, " (synchronized: ", RankList(other.ranks), ").", kStartAgain);
}

std::string RankLeftReport(const std::string& title, int rank) {
  return Concat(title, ": rank ", rank, " has left: its program has ended or called ",
                kShutdown, ", so this exchange cannot complete.");
}

std::string RankFailedReport(int rank, const std::string& text) {
  const std::string where = WhereProgramStands();
  return Concat("ended because of an error on rank ", rank, ": ", text,
                where.empty() ? "" : "\nOn this rank:", where);
}

void NoteFrozen(const std::string& layer, bool is_frozen) {
  std::lock_guard<std::mutex> lock(frozen_mutex);
  if (is_frozen) {
    frozen_layers.insert(layer);
  } else {
    frozen_layers.erase(layer);
  }
}

std::string FrozenClause(const std::string& text) {
  std::lock_guard<std::mutex> lock(frozen_mutex);
  for (const std::string& layer : frozen_layers) {
    const std::string name = Concat('\'', layer, '\'');
    if (text.find(name) == std::string::npos) continue;
    return Concat("has frozen ", name, ": call gluon_syncbn.freeze_statistics on all ranks or on "
                  "none");
  }
  return "";
}

}  // namespace syncbn
