// The error texts of exchanges. Each function returns a whole message.
#pragma once
#include <map>
#include <set>
#include <string>
#include <vector>

#include "exchange/exchange.h"

namespace syncbn {

// Devices of this process are missing; `known` are devices that could have arrived.
std::string DevicesMissingReport(const Exchange& exchange, int rank, const std::set<Device>& known,
                                 double seconds, const std::string& where);

// Ranks are missing; `latest` has the key of each rank's latest part.
std::string RanksMissingReport(const Exchange& exchange, int rank, const std::map<int, Key>& latest,
                               double seconds, const std::string& where);

// The terms of a place's contribution, which must be equal at all places.
struct Terms {
  Place place;
  const Signature& signature;
  const std::vector<int>& ranks;
  size_t devices;  // 0 if a rank contributes
};
std::string DisagreementReport(const Key& key, const Terms& a, const Terms& b);

// The device calls a layer of `size` devices, or a step of these participants.
std::string TooManyDevicesReport(const std::string& layer, const Device& device,
                                 const std::set<Device>& others, size_t size);

// The contribution comes after a failure. A call of the program has no device.
std::string EarlierFailureReport(const Key& key, const Device& device, const std::string& failure);

// The failure has ended this exchange. Returns the failure itself if it began here.
std::string EndReport(const Key& key, const std::string& failure);

}  // namespace syncbn
