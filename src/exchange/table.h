// The exchanges of a process. Devices contribute here and wait, and messages bring the parts of
// other ranks. docs/design/processes.md has the reasons.
//
// A table promises:
// * Devices and ranks may arrive in any order, and have many exchanges in flight, because exchanges
//   match by key (exchange.h). The same inputs have the same result, bit by bit, on every device
//   and rank and in every run.
// * Every wait ends with the result, or with an error that names the missing devices or ranks.
// * The first failure ends all exchanges of the process, and all later ones until Reset. An
//   exchange between ranks fails on all of them, for good.
// * A rank that leaves sends a message, and exchanges that need this rank end at once.
// * A net may move: when a device that is no member calls and no device waits, the layer forgets
//   its members. An error follows if one of these members calls again.
//
// There is no thread for messages: the waiting threads carry them.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/members.h"
#include "exchange/peers.h"
#include "exchange/report.h"

namespace syncbn {

// What a device brings to an exchange.
struct Contribution {
  Phase phase = Phase::kForward;
  Members* members = nullptr;  // the layer's; null for a call of the program
  Device device{};
  std::vector<int64_t> shape{};
  int64_t repeat = 0;
  Signature signature{};
  Numbers numbers{};
  size_t devices = 1;  // how many devices this process has, unless the ticket has participants
  const std::set<Device>* expected = nullptr;  // their names for an error, if the caller has them
  std::vector<int> ranks{};                    // ascending; empty for all
  std::string shared_name{};                   // the layer's or the call's name, equal on all ranks
  double timeout_seconds = 0;
};

// A device that waits in an exchange.
struct Waiting {
  std::shared_ptr<Exchange> exchange;
  const Contribution* own;
  const std::set<Device>* expected;
  bool is_last;  // the last device of this rank waits for other ranks
  Time start, deadline, notice;
};

class Table {
 public:
  using Lock = std::unique_lock<std::mutex>;

  Table() = default;
  // Return the process's table. It is never destroyed, because operators may outlive static
  // destructors.
  static Table& Get();

  // Wait until all others have contributed, and return all numbers, reduced. A forward call makes
  // the ticket, and its backward calls need it. Throws Error.
  Numbers Contribute(const Contribution& own, Ticket* ticket);

  // Expect only these devices from the next forward call on; none means all. No call of the layer
  // may be in flight.
  void SetParticipants(Members* members, std::set<Device> participants);
  // Forget the layer's devices. No call of the layer may be in flight.
  void Restart(Members* members);
  // Return the seconds that a device has waited for other devices and ranks.
  double WaitSeconds(const Members& members, const Device& device);
  // Return the seconds since the first device arrived at the oldest exchange in flight, or 0.
  double LongestWait();

  // End all exchanges with this text, now and until Reset. A no-op in a process that has no layer
  // and no other ranks. Other ranks receive the text if they may wait for this one: if an exchange
  // with them has begun, or `tell_ranks`.
  void Fail(const std::string& text, bool tell_ranks);
  // Return the text of the failure, or an empty one.
  std::string Failure();
  // Forget all devices and exchanges, and the failure, unless other ranks have received it.
  void Reset();

  void Connect(std::unique_ptr<Transport> transport);
  // Tell the other ranks that this process ends, and end its exchanges with them.
  void Leave();
  // Leave, wait until every other rank has left as well or the time is over, and end the use of
  // the transport. Return false if something has failed and another rank does not leave, because
  // it hangs or was stopped.
  bool Disconnect(double seconds, double seconds_after_failure);

 protected:  // tests in simulated time call these
  Waiting Arrive(const Contribution& own, Ticket* ticket, Time now);
  bool Serve(Lock* lock);
  bool IsOver(Lock* lock, Waiting* waiting, Time now);

  std::mutex mutex_;
  std::map<Key, std::shared_ptr<Exchange>> exchanges_;  // all that are in flight
  Peers peers_;

 private:
  using Shared = std::shared_ptr<Exchange>;

  // The calls of one layer or name over ranks, or all calls in this process alone.
  struct Calls {
    int64_t next = 0;      // the next call's number
    int64_t complete = 0;  // the number after the latest call that all devices here have made
    Shared latest;         // the exchange of this latest call
  };
  static Key CountedBy(const Key& key) {
    const Phase phase = key.phase == Phase::kCall ? Phase::kCall : Phase::kForward;
    return {key.is_local, key.is_local ? "" : key.layer, phase, 0, 0};
  }
  Calls& CallsOf(const Key& key) { return calls_[CountedBy(key)]; }

  Ticket Enter(const Contribution& own, const Key& key);
  Shared Find(const Key& key, const Terms& terms);
  void Complete(const Contribution& own, const Shared& exchange);
  Duration Patience(const Exchange& exchange) const;
  std::string MissingReport(const Waiting& waiting, double seconds, const std::string& where) const;
  std::string StateOf(int rank) const;

  void Handle(int from, Message message, const std::string& where);
  void Advance(const Shared& exchange);
  void Finish(const Shared& exchange, Numbers result);
  void End(const Shared& exchange, const std::string& error);
  template <typename Predicate>
  void EndWhere(const std::string& reason, const Predicate& ends);

  void FailLocked(const std::string& text, bool tell_ranks);
  void CheckLeft(const Exchange& exchange);
  template <typename Predicate>
  void ServeUntil(Lock* lock, double seconds, const Predicate& over);

  std::map<Key, Calls> calls_;
  std::string failure_;
  bool failed_for_good_ = false;
  bool notice_given_ = false;  // and no Reset since
  int64_t resets_ = 0;
};

// The timeout in seconds of layers that have none. It is longer than the slowest healthy first step
// that was seen (autotuning, cold caches, a busy machine), and short enough to wait for the error.
inline std::atomic<double> default_timeout{300.0};

}  // namespace syncbn
