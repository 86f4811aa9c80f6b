// The texts that a user reads when processes do not meet.
// Who uses it: protocol.cc. Each function returns the whole message; none of them throws.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "collective/message.h"
#include "collective/process_group.h"

namespace syncbn {

// `arrived` are ranks known to have come; `answers` what those who answered in time said; whoever
// is in neither does not answer.
std::string RanksMissingReport(const Contribution& own, const std::vector<int>& arrived,
                               const std::map<int, Message>& answers, double seconds);

// All have come, but what they sent has not.
std::string PartsMissingReport(const Contribution& own, double seconds);

// `ranks` are those of the message.
std::string ContractsDifferReport(const Contribution& own, int own_rank, int rank,
                                  const Message& message, const std::vector<int>& ranks);

std::string RankLeftReport(const Contribution& own, int rank);

// On a rank that learns of a failure by a message.
std::string RankFailedReport(int rank, const std::string& text);

// "ranks 0, 2"
std::string RankList(const std::vector<int>& ranks);

}  // namespace syncbn
