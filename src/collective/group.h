// The devices that synchronize one layer, and the rounds in which they meet.
// Who uses it: op, through Registry. It must not know what the payloads mean.
//
// A group fails as a whole: when a round times out or its devices disagree, everyone who waits in
// the group and everyone who comes later gets the error, until Reset. Only so can no device take
// part in a round of another step than the rest.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "collective/round.h"
#include "collective/signal.h"

namespace syncbn {

// The place of one forward call in the history of its group. `epoch` changes when the group is
// reset or moves to other devices. Its backward calls meet the same devices, whoever takes part
// in the meantime.
struct Ticket {
  int64_t epoch = 0;
  int64_t number = 0;
  std::shared_ptr<const std::set<Device>> participants;  // null: all devices of the group
};

class Group {
 public:
  explicit Group(std::string layer) : layer_(std::move(layer)) {}

  // Enters `device` into the group of `size` devices and numbers its next forward call.
  // Throws Error if the group has failed, or if more than `size` devices take part.
  Ticket BeginForward(const Device& device, size_t size);

  // Throws Error if the group has failed, or was reset or has moved since the ticket was given.
  void Check(const Ticket& ticket, const std::string& operation, const Device& device);

  // Blocks until `size` distinct devices have brought their payload to this round; returns the
  // reduced payload. Throws Error on timeout, disagreement, or a failed or reset group.
  std::shared_ptr<const Payload> AllReduce(const Ticket& ticket, const RoundKey& key,
                                           const Device& device, Arrival arrival,
                                           Meeting meeting, Reducer reducer);

  // From the next forward call on, exactly these devices take part; none means all devices again.
  // To be called with no call in flight: numbers of devices that sat out catch up here.
  void SetParticipants(std::set<Device> participants);

  // Seconds that devices have waited for others since the group was made, summed over devices.
  double WaitSeconds() const;

  // Training batches that were reduced before the call with this ticket.
  int64_t BatchesBefore(const Ticket& ticket) const;
  int64_t Batches() const;
  void SetBatches(int64_t batches);

  // Fails everyone who waits, now and later, with this text.
  void Fail(const std::string& text);
  // The text of the failure; empty while the group is well.
  std::string Failure() const;
  // Forgets the failure, the devices and the unfinished rounds.
  void Reset();

  // Whether this device has asked for the first time.
  bool IsFirstSeen(const Device& device);

  const std::string& layer() const { return layer_; }

 private:
  using Lock = Signal::Lock;

  [[noreturn]] void FailAndThrow(const std::string& text);
  void StartEpochLocked();
  bool AnyoneWaitsLocked() const;
  int64_t FinishedCallsLocked() const;
  void CheckLocked(const Ticket& ticket, const std::string& operation, const Device& device);
  void AwaitLocked(Lock* lock, const RoundKey& key, const std::shared_ptr<Round>& round,
                   const Meeting& meeting, int64_t epoch);
  void ExchangeLocked(Lock* lock, const Ticket& ticket, const RoundKey& key, Round* round,
                      const Meeting& meeting, Payload* payload);
  int64_t SharedNumberLocked(const Ticket& ticket, const RoundKey& key, const Across& across);

  const std::string layer_;
  mutable std::mutex mutex_;
  Signal changed_;
  std::map<RoundKey, std::shared_ptr<Round>> rounds_;
  std::map<Device, int64_t> forward_calls_;  // of this epoch; its keys are the members
  std::set<Device> former_members_;
  std::set<Device> seen_;
  std::shared_ptr<const std::set<Device>> participants_;
  std::string failure_;
  size_t size_ = 0;
  int64_t first_number_ = 0;  // of a device that comes for the first time in this epoch
  double wait_seconds_ = 0;
  int64_t epoch_ = 0;
  int64_t batches_before_epoch_ = 0;
  // Between processes calls are numbered from the begin of the processes' era, because local epochs
  // begin at other times on other ranks.
  ProcessGroup* processes_ = nullptr;  // those of the latest round
  int64_t calls_before_epoch_ = 0;
  int64_t era_ = -1, first_call_of_era_ = 0;
};

}  // namespace syncbn
