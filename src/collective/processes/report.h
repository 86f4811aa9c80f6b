// The texts that a user reads when an exchange between processes fails. Reports are whole messages,
// and none throws. An agreement's ranks are not empty here.
#pragma once
#include <string>
#include <vector>

#include "collective/processes/message.h"

namespace syncbn {

// Functions of the Python package.
constexpr char kInit[] = "gluon_syncbn.distributed.init()";
constexpr char kShutdown[] = "gluon_syncbn.distributed.shutdown()";

// `missing` says of each missing rank what is known of it: "rank 1, which ...".
std::string RanksMissingReport(const Agreement& own, const std::vector<int>& present,
                               const std::vector<std::string>& missing, double seconds);

std::string SignaturesDifferReport(const Agreement& own, int own_rank, const Agreement& other,
                                   int other_rank);

std::string RankLeftReport(const std::string& title, int rank);

// For a rank that learns of a failure by a message.
std::string RankFailedReport(int rank, const std::string& text);

// Notes that this process has frozen a layer, named as among processes, and so does not meet others
// in it; or no longer. Thread-safe.
void NoteFrozen(const std::string& layer, bool is_frozen);

// "has frozen 'norm0': ..." for the first frozen layer that `text` names in quotes; empty for none.
std::string FrozenClause(const std::string& text);

}  // namespace syncbn
