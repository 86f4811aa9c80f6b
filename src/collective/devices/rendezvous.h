// One rendezvous of all devices of a layer: the payload of each, and the result for all.
// Who uses it: Group, which guards it with its mutex, and report.cc, which reads it for messages.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "collective/common/bytes.h"
#include "collective/common/reduce_operation.h"
#include "collective/devices/call_numbers.h"
#include "collective/devices/device.h"
#include "collective/processes/communicator.h"

namespace syncbn {

// Two rendezvous of one layer can be in flight at once (a layer used twice, forward of the next
// step beside backward of this one), so the phase alone is no key.
struct RendezvousKey {
  int64_t number = 0;  // of the forward call, which its backward calls carry
  int64_t repeat = 0;  // counts those of one forward call and phase (retain_graph)
  std::string phase;   // "forward" or "backward"
};

inline bool operator<(const RendezvousKey& a, const RendezvousKey& b) {
  return std::tie(a.number, a.repeat, a.phase) < std::tie(b.number, b.repeat, b.phase);
}

// A device's part in a rendezvous.
struct Arrival {
  std::string signature;  // must be equal on all devices: "channels=64, dtype=float32"
  std::string shape;      // shown in messages
  Bytes payload;
};

// One forward call of a device. Its backward calls have the same participants.
struct Ticket {
  int64_t number = 0;
  Participants participants;
};

// The other processes, for one exchange of the devices' reduced payload.
struct AcrossProcesses {
  Communicator* processes = nullptr;  // null: none
  std::vector<int> ranks;             // as in Contribution
  std::string name;                   // of the layer, equal on all ranks and unique in each
  std::string signature;              // must be equal on all ranks
};

struct AllReduceOptions {
  Ticket ticket;
  std::string phase;          // "forward" or "backward"
  int64_t repeat = 0;         // rendezvous of this forward call in this phase before this one
  Device device;              // that arrives
  Arrival arrival;            // its part
  size_t size = 1;            // devices that must arrive, unless the ticket names them
  std::set<Device> expected;  // as far as the caller knows them; only for messages
  double timeout_seconds = 0;
  ReduceOperation operation = ReduceOperation::kSumFloat64;
  AcrossProcesses across;
};

struct Rendezvous {
  // Takes a device's part; returns true if it is the last. Throws Error if the device has arrived
  // before, or if its signature differs from that of the others.
  bool Arrive(AllReduceOptions* options);
  // The payloads, reduced in the order of the devices. Throws Error if they do not fit together.
  Bytes Reduced(ReduceOperation operation) const;

  std::map<Device, Arrival> arrivals;
  std::shared_ptr<const Bytes> result;  // null until the payloads are reduced
};

// Exchanges the devices' reduced `payload` with other processes, which know the forward call by
// `number`. Throws Error.
Bytes ExchangeAcross(const AllReduceOptions& options, int64_t number, Bytes payload);

}  // namespace syncbn
