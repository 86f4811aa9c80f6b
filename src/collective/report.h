// The texts that a user reads when a rendezvous of devices or an exchange between processes fails.
// Who uses it: Group, and Protocol with its parts. Each function returns the whole message; none of
// them throws.
#pragma once
#include <map>
#include <set>
#include <string>
#include <vector>

#include "collective/calls.h"
#include "collective/message.h"
#include "collective/process_group.h"
#include "collective/rendezvous.h"

namespace syncbn {

// ---- devices -----------------------------------------------------------------------------------

// "SyncBatchNorm 'norm0', forward"
std::string Title(const std::string& layer, const std::string& phase);

std::string TimeoutReport(const std::string& title, const Rendezvous& rendezvous,
                          const Absence& absence, double seconds);

std::string DisagreementReport(const std::string& title, const Rendezvous& rendezvous,
                               const Device& device, const Arrival& arrival);

std::string TooManyDevicesReport(const std::string& layer, const Device& device,
                                 const std::set<Device>& others, size_t size);

// For a device that was said not to take part.
std::string SitsOutReport(const std::string& layer, const Device& device,
                          const std::set<Device>& participants);

std::string TwiceReport(const std::string& title, const Device& device);

// For a device that calls a layer after the layer has failed.
std::string EarlierFailureReport(const std::string& title, const Device& device,
                                 const std::string& failure);

// For a call that belongs to a forward call before a reset.
std::string WasResetReport();

// ---- processes ---------------------------------------------------------------------------------

// `arrived` are ranks known to take part; `answers` are from those who answered in time; whoever is
// in neither does not answer.
std::string RanksMissingReport(const Contribution& own, const std::vector<int>& arrived,
                               const std::map<int, Message>& answers, double seconds);

// All take part, but their parts do not arrive.
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
