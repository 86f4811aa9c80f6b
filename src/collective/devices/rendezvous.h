// One rendezvous of all devices of a layer: the payload of each, and the result for all.
// Group guards it with its mutex.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>

#include "collective/common/reduce_operation.h"
#include "collective/common/timeout.h"
#include "collective/devices/call_numbers.h"
#include "collective/devices/device.h"
#include "collective/processes/communicator.h"

namespace syncbn {

// Two rendezvous of one layer can be in flight at once (a layer used twice, forward of the next
// step beside backward of this one), so the phase alone is no key.
using RendezvousKey = std::tuple<int64_t, int64_t, std::string>;  // ticket's number, repeat, phase

// A device's part in a rendezvous.
struct Arrival {
  std::string signature;  // must be equal on all devices: "channels=64, dtype=float32"
  std::string shape;      // shown in messages
  Payload payload;
};

// One forward call of a device. Its backward calls have the same participants.
struct Ticket {
  int64_t number = 0;
  Participants participants;
  std::string key{};  // by which all ranks know the call; from the result of its first rendezvous
};

struct AllReduceOptions {
  Ticket ticket;
  std::string phase;          // "forward" or "backward"
  int64_t repeat = 0;         // rendezvous of this forward call in this phase before this one
  Device device;              // that arrives
  Arrival arrival;            // its part
  size_t size = 1;            // devices that must arrive, unless the ticket names them
  std::set<Device> expected;  // as far as the caller knows them; only for messages
  Communicator* processes = nullptr;  // that exchange the reduced payload; null for none
  std::string shared_name;            // of the layer, equal on all ranks and unique in each
  // The operation and the timeout, of the devices too; for processes also ranks and signature.
  Contribution contribution;
};

struct Reduced {
  Payload payload;
  std::string key;  // of the ticket
};

struct Rendezvous {
  // Adds a device's part. Throws Error if the device has arrived before, or if its signature
  // differs from that of the others.
  void Add(const Device& device, Arrival arrival);

  // The payloads as one, in the order of the devices. Throws Error if they do not fit together.
  Payload ReducePayloads(ReduceOperation operation) const;

  const Time start = Clock::now();
  std::map<Device, Arrival> arrivals;
  std::shared_ptr<const Reduced> result;  // null until the payloads are reduced
};

// Reduces the devices' result with those of other processes. The first rendezvous of a forward call
// has no key yet, and gets one. Blocks; throws Error.
void ExchangeBetweenProcesses(const AllReduceOptions& options, Reduced* result);

}  // namespace syncbn
