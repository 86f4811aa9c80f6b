// Notes of the calls of a layer on each device, by which the text of a timeout tells its causes
// apart.
// Who uses it: Group has a CallLog; threads that drive devices say so through the C functions. It
// must not know what a call computes, and only errors and their texts may depend on it.
#pragma once
#include <cstdint>
#include <map>
#include <mutex>
#include <set>

#include "collective/devices/device.h"
#include "collective/devices/rendezvous.h"

namespace syncbn {

// A driver calls a function for each of several devices, from a thread of that device. Between
// these two calls the calling thread does so for `device`, which is one of `devices`.
void EnterDriver(const Device& device, int devices);
void LeaveDriver(const Device& device);

// The known facts about a rendezvous to which some devices did not come.
struct Absence {
  const AllReduceOptions& options;  // of a device that has arrived
  const Rendezvous& rendezvous;
  bool needs_driver = false;   // the layer is made to be called by a driver only
  int driver = 0;              // devices of the driver that called the arrived one; 0 for none
  std::set<Device> in_driver{};  // arrived, but the driver's function for them has not ended
  std::set<Device> again{};      // arrived, and the next call of the layer is queued
  std::set<Device> missing{};    // as far as their names are known
  std::set<Device> queued{};     // missing, but a call of the layer is queued
  std::set<Device> idle{};       // missing, and no call of the layer is queued
  std::set<Device> never{};      // missing, and have never called the layer

  // The number of missing devices whose names are not known.
  size_t Unknown() const { return options.size - rendezvous.arrivals.size() - missing.size(); }
};

class CallLog {
 public:
  // Counts the calls that a reset has made void.
  using Epoch = int64_t;

  // The calling thread queues a call on `device`, which will begin or be deleted.
  Epoch NoteQueued(const Device& device);
  // The call begins, or never will. Calls that are queued once and begin often, as those of a
  // static graph, are not counted: whether one is queued is not known.
  void NoteBegun(const Device& device, Epoch epoch, bool is_first);
  // The layer is made to be called by a driver only.
  void ExpectDriver();
  // Forgets all queued calls.
  void Clear();

  // True if drivers of several devices have queued the latest calls on `device` and on another one.
  bool DrivesBoth(const Device& device, const std::set<Device>& others) const;

  // The facts about a rendezvous that was not completed; `members` have called the layer before.
  Absence Describe(const AllReduceOptions& options, const Rendezvous& rendezvous,
                   const std::set<Device>& members) const;

 private:
  struct Calls {
    int queued = 0;
    int driver = 0;        // of the latest call
    bool repeats = false;  // see NoteBegun
  };
  Calls OfLocked(const Device& device) const;

  mutable std::mutex mutex_;
  std::map<Device, Calls> calls_;
  Epoch epoch_ = 0;
  bool needs_driver_ = false;
};

}  // namespace syncbn
