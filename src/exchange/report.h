// The error texts of exchanges. Each function returns a whole message.
#pragma once
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "exchange/exchange.h"

namespace syncbn {

// Functions of the Python package.
constexpr char kInit[] = "gluon_syncbn.distributed.init()";
constexpr char kShutdown[] = "gluon_syncbn.distributed.shutdown()";

// The failure of a backward call whose forward call came before a reset.
constexpr char kWasReset[] =
    "gluon_syncbn.recover() or a conversion of the net came after the forward call of this "
    "backward call. Run forward again.";

// Devices of this process are missing; `known` are devices that could have arrived.
std::string DevicesMissingReport(const Exchange& exchange, int rank, const std::set<Device>& known,
                                 double seconds, const std::string& where);

// Ranks are missing; `state` describes one: "which has sent nothing yet".
std::string RanksMissingReport(const Exchange& exchange, int rank,
                               const std::function<std::string(int)>& state, double seconds,
                               const std::string& where);

// The terms of a place's contribution, which must be equal at all places.
struct Terms {
  Place place;
  const Signature& signature;
  const std::vector<int>& ranks;
  size_t devices;                     // 0 if a rank contributes
  const std::vector<int64_t>& shape;  // empty if a rank contributes
};
std::string DisagreementReport(const Key& key, const Terms& a, const Terms& b);

std::string TooManyDevicesReport(const std::string& layer, const Device& device,
                                 const std::set<Device>& others, size_t size);

// The device is no participant.
std::string NoParticipantReport(const std::string& layer, const Device& device,
                                const std::set<Device>& participants);

// The device has contributed before.
std::string TwiceReport(const Key& key, const Device& device);

// The contribution comes after a failure. A call of the program has no device.
std::string EarlierFailureReport(const Key& key, const Device& device, const std::string& failure);

// The failure has ended this exchange. Returns the failure itself if it began here.
std::string EndReport(const Key& key, const std::string& failure);

std::string RankLeftReport(const Key& key, int rank);

// A message has brought the failure.
std::string RankFailedReport(int rank, const std::string& text, const std::string& where);

}  // namespace syncbn
