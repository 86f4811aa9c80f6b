// The error messages of exchanges. Each function returns the whole message.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "exchange/exchange.h"

namespace syncbn {

// Functions of the Python package.
constexpr char kInit[] = "gluon_syncbn.distributed.init()";
constexpr char kShutdown[] = "gluon_syncbn.distributed.shutdown()";

// The error of a backward call whose forward call was before a reset.
constexpr char kWasReset[] =
    "the layer was reset by gluon_syncbn.recover() after the forward call that this call belongs "
    "to.";

// Devices of this process are missing. `known` are the devices that could have arrived.
std::string DevicesMissingReport(const Exchange& exchange, int rank, const std::set<Device>& known,
                                 double seconds, const std::string& where);

// Ranks are missing. `missing` has a text for each rank, like "rank 1, which ...".
std::string RanksMissingReport(const Exchange& exchange, const std::vector<int>& present,
                               const std::vector<std::string>& missing, double seconds,
                               const std::string& where);

// The properties of a contribution that all places must share, and the shape of a device's data.
struct Terms {
  Place place;
  const Signature& signature;
  const std::vector<int>& ranks;
  size_t devices;  // number of devices on this rank; 0 if the place is a rank
  const std::vector<int64_t>& shape;
};
std::string DisagreementReport(const Key& key, const Terms& a, const Terms& b);

std::string TooManyDevicesReport(const std::string& layer, const Device& device,
                                 const std::set<Device>& others, size_t size);

// A device that does not participate has called.
std::string NoParticipantReport(const std::string& layer, const Device& device,
                                const std::set<Device>& participants);

// A device has arrived twice.
std::string DuplicateReport(const Key& key, const Device& device);

// A contribution follows a failure. A named call has no device.
std::string EarlierFailureReport(const Key& key, const Device& device, const std::string& failure);

// The error of a pending exchange after a failure: the failure itself if it is of this exchange.
std::string EndReport(const Key& key, const std::string& failure);

std::string RankLeftReport(const Key& key, int rank);

// Another rank has reported a failure.
std::string RankFailedReport(int rank, const std::string& text, const std::string& where);

}  // namespace syncbn
