// The texts that a user reads when an exchange fails. Each function returns the whole message.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "exchange/exchange.h"

namespace syncbn {

// Functions of the Python package.
constexpr char kInit[] = "gluon_syncbn.distributed.init()";
constexpr char kShutdown[] = "gluon_syncbn.distributed.shutdown()";

// The failure of a call that belongs to a forward call before a reset.
constexpr char kWasReset[] =
    "the layer was reset by gluon_syncbn.recover() after the forward call that this call belongs "
    "to.";

// Where devices of this process are missing: `known` are devices that could have arrived.
std::string DevicesMissingReport(const Exchange& exchange, int rank, const std::set<Device>& known,
                                 double seconds, const std::string& where);

// Where ranks are missing: `missing` says of each what is known of it: "rank 1, which ...".
std::string RanksMissingReport(const Exchange& exchange, const std::vector<int>& present,
                               const std::vector<std::string>& missing, double seconds,
                               const std::string& where);

// What a place contributes, of which all places must have the same.
struct Terms {
  Place place;
  const Signature& signature;
  const std::vector<int>& ranks;
  size_t devices;                     // of a device's rank
  const std::vector<int64_t>& shape;  // of a device
};
std::string DisagreementReport(const Key& key, const Terms& a, const Terms& b);

std::string TooManyDevicesReport(const std::string& layer, const Device& device,
                                 const std::set<Device>& others, size_t size);

// For a device that is not one of the participants.
std::string NoParticipantReport(const std::string& layer, const Device& device,
                                const std::set<Device>& participants);

// For a device that arrives twice.
std::string TwiceReport(const Key& key, const Device& device);

// For who comes after a failure; a call of the program has no device.
std::string EarlierFailureReport(const Key& key, const Device& device, const std::string& failure);

// For who waits in an exchange when another one fails; the failure itself if it is of this one.
std::string EndReport(const Key& key, const std::string& failure);

std::string RankLeftReport(const Key& key, int rank);

// For a rank that learns of a failure by a message.
std::string RankFailedReport(int rank, const std::string& text, const std::string& where);

}  // namespace syncbn
