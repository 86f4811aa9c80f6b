// One meeting of all devices of a layer: what each brought, and what they leave with.
// Who uses it: Group, which guards it with its mutex, and report.cc, which reads it for messages.
#pragma once
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "collective/device.h"
#include "collective/payload.h"
#include "collective/process_group.h"

namespace syncbn {

// Merges what the devices brought, given in the order of the devices.
using Reducer = void (*)(const std::vector<const Payload*>& payloads, Payload* result);

// Which meeting of a layer is meant. Two meetings of one layer can be in flight at once (a layer
// used twice, forward of the next step beside backward of this one), so the operation alone is no
// key: `number` counts the forward calls of a device, and a backward call carries the number of
// its forward call; `repeat` counts backward calls of one forward call (retain_graph).
struct RoundKey {
  std::string operation;  // "forward" or "backward"
  int64_t number = 0;
  int64_t repeat = 0;
};

inline bool operator<(const RoundKey& a, const RoundKey& b) {
  return std::tie(a.number, a.repeat, a.operation) < std::tie(b.number, b.repeat, b.operation);
}

// What a device brings to a round.
struct Arrival {
  std::string contract;  // must be equal on all devices, for example "channels=64, dtype=float32"
  std::string shape;     // shown in messages
  Payload payload;
  std::chrono::steady_clock::time_point time;
};

// With which other processes a round's local result is merged.
struct Across {
  ProcessGroup* processes = nullptr;  // null: with none
  std::vector<int> ranks;             // as in Contribution
  std::string name;      // of the layer, equal on all ranks and unique in each
  std::string contract;  // what must be equal on all ranks
  std::string merger;    // the reducer's counterpart, see merger.h
};

// Who has to come, and how long each waits.
struct Meeting {
  size_t size = 1;
  std::set<Device> expected;  // as far as the caller knows them; only for messages
  double timeout_seconds = 0;
  Across across;
};

struct Round {
  std::map<Device, Arrival> arrivals;
  std::shared_ptr<const Payload> result;  // null until the last device has come
  bool exchanging = false;  // all devices have come; other processes are awaited
  size_t departures = 0;
};

}  // namespace syncbn
