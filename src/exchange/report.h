// The error texts of exchanges.
#pragma once
#include <map>
#include <set>
#include <string>
#include <vector>

#include "exchange/exchange.h"

namespace syncbn {

inline constexpr char kShutdown[] = "gluon_syncbn.distributed.shutdown()";

// The error of a wait for devices of this process. `known` may lack devices of the layer. `where`
// is the text of WhereProgramStands (core/program.h), or null for a status: then no advice follows.
std::string DevicesMissingReport(const Exchange& exchange, int rank, const std::set<Device>& known,
                                 double seconds, const std::string* where);

// The error of a wait for other ranks; `latest` has the key of each rank's latest part.
std::string RanksMissingReport(const Exchange& exchange, int rank, const std::map<int, Key>& latest,
                               double seconds, const std::string* where);

// A device or child rank (Place in exchange.h), and its values that must be equal at all places.
struct Terms {
  Place place;
  const Signature& signature;
  size_t devices;  // how many the layer has on this rank; 0 if the place is a child rank
};
std::string DisagreementReport(const Key& key, const Terms& a, const Terms& b);

// The error of a device that calls a layer of `size` devices in addition to the `others`.
std::string TooManyDevicesReport(const std::string& layer, const Device& device,
                                 const std::set<Device>& others, size_t size);

// The message of a rank that has ended and waits for the ranks `staying`.
std::string StayingReport(int rank, const std::vector<int>& staying);

}  // namespace syncbn
