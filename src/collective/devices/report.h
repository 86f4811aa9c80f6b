// The texts that a user reads when a rendezvous of devices fails.
// Who uses it: group.cc. Each function returns the whole message; none of them throws.
#pragma once
#include <set>
#include <string>

#include "collective/devices/calls.h"
#include "collective/devices/rendezvous.h"

namespace syncbn {

// "SyncBatchNorm 'norm0', forward"
std::string Title(const std::string& layer, const std::string& phase);

std::string TimeoutReport(const std::string& title, const Rendezvous& rendezvous,
                          const Absence& absence, double seconds);

std::string DisagreementReport(const std::string& title, const Rendezvous& rendezvous,
                               const Device& device, const Arrival& arrival);

std::string TooManyDevicesReport(const std::string& layer, const Device& device,
                                 const std::set<Device>& others, size_t size);

// For a device that is not one of the participants.
std::string SitsOutReport(const std::string& layer, const Device& device,
                          const std::set<Device>& participants);

std::string TwiceReport(const std::string& title, const Device& device);

// For a device that calls a layer after the layer has failed.
std::string EarlierFailureReport(const std::string& title, const Device& device,
                                 const std::string& failure);

// For a call that belongs to a forward call before a reset.
std::string WasResetReport();

}  // namespace syncbn
