// The devices of one process that synchronize one layer, and their rendezvous. It must not know
// what the payloads mean, nor how processes exchange theirs.
//
// What a group promises:
// * Each forward call of a device has a number, and devices meet by number and phase: a device may
//   run ahead of others, and phases may overlap.
// * Payloads are reduced in the order of the devices, never of their arrival: the same inputs have
//   the same result, bit by bit, on every device and in every run.
// * With other processes, the devices' reduced payload goes through one exchange (communicator.h).
// * Every wait ends: with the result, after the timeout, or with the group's failure.
// * A group fails as a whole: when a rendezvous times out or its devices disagree, everyone who
//   waits in the group and everyone who arrives later gets the error, until Reset. Otherwise a late
//   device could join a rendezvous of the next step.
// * A net may move: when a device that is not a member calls and no device waits, the group forgets
//   its members. If one of those calls again, too many devices are in use, and the group fails.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "collective/devices/call_numbers.h"
#include "collective/devices/rendezvous.h"
#include "collective/devices/signal.h"

namespace syncbn {

class Group {
  using Lock = Signal::Lock;

 public:
  explicit Group(std::string layer) : layer_(std::move(layer)) {}
  ~Group() { SetFailure(""); }

  // The number of groups of the process that have failed and were not reset since then.
  static inline std::atomic<int> failed{0};

  // Enters `device` into the group of `size` devices and numbers its next forward call.
  // Throws Error if the group has failed, or if more than `size` devices call.
  Ticket BeginForward(const Device& device, size_t size);

  // Throws Error if the group has failed, or was reset or has moved since the ticket was made.
  void Check(const Ticket& ticket, const std::string& phase, const Device& device) {
    Lock lock(mutex_);
    CheckLocked(ticket, phase, device);
  }

  // Blocks until all devices have arrived at this rendezvous; returns their payloads, reduced.
  // Throws Error on timeout, disagreement, or a failed or reset group.
  std::shared_ptr<const Reduced> AllReduce(AllReduceOptions options);

  // From the next forward call on, only these devices participate; none means all.
  // Must be called with no call in flight: all devices continue with the same number.
  void SetParticipants(std::set<Device> participants);

  // Seconds that a device has waited for other devices and processes.
  double WaitSeconds(const Device& device) const;

  // Seconds since the first device arrived at the oldest rendezvous that is not complete; 0 if none.
  double LongestWait() const;

  // Fails everyone who waits, now and later, with this text.
  void Fail(const std::string& text);
  // Empty if nothing has failed.
  std::string Failure() const {
    Lock lock(mutex_);
    return failure_;
  }
  // Forgets the failure, the devices and the unfinished rendezvous.
  void Reset();

  // Thread-safe without the group.
  const std::string& layer() const { return layer_; }

 private:
  [[noreturn]] void FailAndThrow(const std::string& text);
  // The first failure since the latest reset; an empty text forgets it.
  void SetFailure(const std::string& text);
  void CheckLocked(const Ticket& ticket, const std::string& phase, const Device& device);
  void EnterLocked(const Device& device, size_t size);
  void CheckAfterWait(const Ticket& ticket) const;
  std::string ReportTimeoutLocked(Lock* lock, const Rendezvous& rendezvous,
                                  const AllReduceOptions& options, double waited) const;
  void AwaitLocked(Lock* lock, const Rendezvous& rendezvous, const AllReduceOptions& options);
  void ExchangeLocked(Lock* lock, const AllReduceOptions& options, Reduced* result);

  const std::string layer_;
  mutable std::mutex mutex_;
  Signal changed_;
  std::map<RendezvousKey, std::shared_ptr<Rendezvous>> rendezvous_;  // not complete
  CallNumbers numbers_;
  std::set<Device> former_members_;  // since the latest Reset
  Participants participants_;        // of the next forward calls
  size_t size_ = 0;                  // of the latest forward call
  Communicator* processes_ = nullptr;  // of the latest rendezvous
  std::string failure_;
  std::map<Device, double> wait_seconds_;
};

}  // namespace syncbn
