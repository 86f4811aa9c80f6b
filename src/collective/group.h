// The devices that synchronize one layer, and their rendezvous.
// Who uses it: op, through Registry. It must not know what the payloads mean.
//
// A group fails as a whole: when a rendezvous times out or its devices disagree, everyone who waits
// in the group and everyone who arrives later gets the error, until Reset. Else a late device could
// take part in a rendezvous of the next step.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "collective/calls.h"
#include "collective/rendezvous.h"
#include "collective/signal.h"

namespace syncbn {

// The place of one forward call in the history of its group. A generation of a group ends when the
// group is reset or moves to other devices. The backward calls of a forward call have its
// participants, whoever takes part in the meantime.
struct Ticket {
  int64_t generation = 0;
  int64_t number = 0;
  std::shared_ptr<const std::set<Device>> participants;  // null: all devices of the group
};

class Group {
 public:
  explicit Group(std::string layer) : layer_(std::move(layer)) {}

  // Enters `device` into the group of `size` devices and numbers its next forward call.
  // Throws Error if the group has failed, or if more than `size` devices take part.
  Ticket BeginForward(const Device& device, size_t size);

  // Throws Error if the group has failed, or was reset or has moved since the ticket was made.
  void Check(const Ticket& ticket, const std::string& phase, const Device& device);

  // Blocks until `options.size` distinct devices have arrived at this rendezvous; returns their
  // payloads, reduced in the order of the devices. Throws Error on timeout, disagreement, or a
  // failed or reset group.
  std::shared_ptr<const Bytes> AllReduce(const Ticket& ticket, const RendezvousKey& key,
                                         const Device& device, Arrival arrival,
                                         RendezvousOptions options);

  // From the next forward call on, exactly these devices take part; none means all devices again.
  // To be called with no call in flight: all devices continue with the same number.
  void SetParticipants(std::set<Device> participants);

  // Seconds that devices have waited for others since the group was made, summed over devices.
  double WaitSeconds() const;

  // Fails everyone who waits, now and later, with this text.
  void Fail(const std::string& text);
  // The text of the failure; empty while the group is well.
  std::string Failure() const;
  // Forgets the failure, the devices and the unfinished rendezvous.
  void Reset();

  // The calling thread queues a call on `device`, which will begin or be deleted; see CallLog.
  // `is_first` becomes true if none was queued on this device before.
  CallLog::Epoch NoteQueued(const Device& device, bool* is_first);
  void NoteBegun(const Device& device, CallLog::Epoch epoch, bool is_first);
  // Says that the layer is made to be called by a driver only; for messages.
  void ExpectDriver();

  const std::string& layer() const { return layer_; }

 private:
  using Lock = Signal::Lock;

  [[noreturn]] void FailAndThrow(const std::string& text);
  Absence DescribeLocked(const RendezvousKey& key, const Rendezvous& rendezvous,
                         const RendezvousOptions& options) const;
  void StartGenerationLocked();
  bool AnyoneWaitsLocked() const;
  bool IsDrivenBesideMemberLocked(const Device& device) const;
  int64_t MostCallsLocked() const;
  int64_t FinishedCallsLocked() const;
  void CheckLocked(const Ticket& ticket, const std::string& phase, const Device& device);
  Bytes ReduceLocked(const RendezvousKey& key, const Rendezvous& rendezvous,
                     const std::string& operation);
  void AwaitLocked(Lock* lock, const Ticket& ticket, const RendezvousKey& key,
                   const std::shared_ptr<Rendezvous>& rendezvous,
                   const RendezvousOptions& options);
  Bytes ExchangeLocked(Lock* lock, const Ticket& ticket, const RendezvousKey& key,
                       const RendezvousOptions& options, Bytes payload);
  int64_t SharedNumberLocked(const Ticket& ticket, const RendezvousKey& key);

  const std::string layer_;
  mutable std::mutex mutex_;
  Signal changed_;
  std::map<RendezvousKey, std::shared_ptr<Rendezvous>> rendezvous_;
  std::map<Device, int64_t> forward_calls_;  // of this generation; its keys are the members
  std::set<Device> former_members_;
  CallLog calls_;
  bool needs_driver_ = false;
  std::shared_ptr<const std::set<Device>> participants_;
  std::string failure_;
  size_t size_ = 0;
  int64_t first_number_ = 0;  // of a device's first call in this generation
  double wait_seconds_ = 0;
  int64_t generation_ = 0;
  // Between processes calls are numbered from the begin of the processes' generation, because the
  // group's own generations begin at other times on other ranks.
  ProcessGroup* processes_ = nullptr;  // those of the latest rendezvous
  int64_t calls_before_generation_ = 0, first_shared_call_ = 0;
  Generation shared_generation_{-1, 0};
};

}  // namespace syncbn
