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

#include "collective/bytes.h"
#include "collective/device.h"
#include "collective/process_group.h"

namespace syncbn {

// Two rendezvous of one layer can be in flight at once (a layer used twice, forward of the next
// step beside backward of this one), so the phase alone is no key: `number` counts the forward
// calls of a device, and a backward call carries the number of its forward call; `repeat` counts
// backward calls of one forward call (retain_graph).
struct RendezvousKey {
  std::string phase;  // "forward" or "backward"
  int64_t number = 0;
  int64_t repeat = 0;
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

// The other processes that take part, through one exchange of the devices' reduced payload.
struct AcrossProcesses {
  ProcessGroup* processes = nullptr;  // null: none
  std::vector<int> ranks;             // as in Contribution
  std::string name;       // of the layer, equal on all ranks and unique in each
  std::string signature;  // must be equal on all ranks
};

struct RendezvousOptions {
  size_t size = 1;            // devices that take part
  std::set<Device> expected;  // as far as the caller knows them; only for messages
  double timeout_seconds = 0;
  std::string operation;  // the name of a reduce operation
  AcrossProcesses across;
};

struct Rendezvous {
  std::map<Device, Arrival> arrivals;
  std::shared_ptr<const Bytes> result;  // null until the payloads are reduced
  bool exchanging = false;  // all devices have arrived; other processes are awaited
  size_t departures = 0;
};

}  // namespace syncbn
