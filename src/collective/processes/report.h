// The texts that a user reads when an exchange between processes fails.
// Who uses it: Protocol and its parts. Each function returns the whole message; none throws.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "collective/processes/message.h"

namespace syncbn {

// Functions of the Python package.
constexpr char kInit[] = "gluon_syncbn.distributed.init()";
constexpr char kShutdown[] = "gluon_syncbn.distributed.shutdown()";
constexpr char kJoin[] = "distributed.join";

// `arrived` are the ranks that have begun the exchange, `answers` those of ranks that answered in
// time; a rank in neither did not answer.
std::string RanksMissingReport(const Contribution& own, const std::vector<int>& arrived,
                               const std::map<int, Message>& answers, double seconds);

// All ranks have begun, but their parts do not arrive.
std::string PartsMissingReport(const Contribution& own, double seconds);

// `ranks` are those that `message`, from `rank`, names.
std::string SignaturesDifferReport(const Contribution& own, int own_rank, int rank,
                                   const Message& message, const std::vector<int>& ranks);

std::string RankLeftReport(const std::string& title, int rank);

// For a rank that learns of a failure by a message.
std::string RankFailedReport(int rank, const std::string& text);

// "ranks 0, 2"
std::string RankList(const std::vector<int>& ranks);

}  // namespace syncbn
