// The texts that a user reads when devices do not meet.
// Who uses it: Group. Each function returns the whole message; none of them throws.
#pragma once
#include <set>
#include <string>

#include "collective/round.h"

namespace syncbn {

// `known` are the devices that should come, as far as they are known; `size` is num_devices.
std::string TimeoutReport(const std::string& layer, const std::string& operation,
                          const Round& round, const std::set<Device>& known, size_t size,
                          double seconds);

std::string DisagreementReport(const std::string& layer, const std::string& operation,
                               const Round& round, const Device& device, const Arrival& arrival);

std::string TooManyDevicesReport(const std::string& layer, const Device& device,
                                 const std::set<Device>& others, size_t size);

// For a device that was said not to take part.
std::string SitsOutReport(const std::string& layer, const Device& device,
                          const std::set<Device>& participants);

std::string TwiceReport(const std::string& layer, const std::string& operation,
                        const Device& device);

// For a device that calls a layer after the layer has failed.
std::string EarlierFailureReport(const std::string& layer, const std::string& operation,
                                 const Device& device, const std::string& failure);

}  // namespace syncbn
