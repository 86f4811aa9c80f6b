// All exchanges of a process. Devices contribute and wait here; messages bring the parts of other
// ranks. docs/design/processes.md explains why.
//
// A table promises:
// * Devices and ranks may arrive in any order, and have many exchanges in flight, because exchanges
//   match by key (exchange.h). The same inputs give the same result, bit for bit, on every
//   device and rank and in every run.
// * Every wait ends with the result or an error. A timeout names the missing devices or ranks.
// * The first failure ends all exchanges of the process, and all later ones until Reset. If an
//   exchange between ranks fails, it fails on all ranks, for good.
// * A rank that leaves sends a message, and exchanges that need it end at once.
// * A net may move: if a new device calls a layer that has all its devices, and none of them waits,
//   the layer forgets them. If a forgotten device calls again, that is an error.
//
// No extra thread handles messages: waiting threads do.
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
#include "exchange/peers.h"
#include "exchange/report.h"

namespace syncbn {

// The devices of a call; null for all devices of the layer.
using Participants = std::shared_ptr<const std::set<Device>>;

// A forward call of a device. Its backward calls need it.
struct Ticket {
  int64_t number = 0;  // the same on all devices and ranks
  int64_t generation = 0;
  Participants participants{};
};

// The devices of a layer in this process. A Table guards it with its mutex.
struct Members {
  explicit Members(std::string name) : layer(std::move(name)) { ++alive; }
  ~Members() { --alive; }
  Members(const Members&) = delete;

  // Forget all devices. Their tickets are not valid any more.
  void Forget() {
    devices.clear();
    former.clear();
    ++generation;
  }

  const std::string layer;
  std::set<Device> devices;   // they have called the layer
  std::set<Device> former;    // before the net moved
  Participants participants;  // the next forward calls have them
  int64_t generation = 0;     // tickets of an older one are not valid
  int64_t resets = 0;         // the resets of the table that this layer has followed
  std::map<Device, double> wait_seconds;
  static inline std::atomic<int> alive{0};
};

// A device's contribution to an exchange.
struct Contribution {
  Phase phase = Phase::kForward;
  Members* members = nullptr;  // the layer's; null for a named call by the program
  Device device{};
  std::vector<int64_t> shape{};
  int64_t repeat = 0;
  Signature signature{};
  Numbers numbers{};
  size_t devices = 1;  // the number that takes part in this process, unless the ticket lists them
  const std::set<Device>* expected = nullptr;  // the devices for errors, if the caller knows them
  std::vector<int> ranks{};                    // ascending; empty for all, unlike Exchange::ranks
  std::string shared_name{};                   // the layer's or the call's name, equal on all ranks
  double timeout_seconds = 0;
};

// A device that waits in an exchange.
struct Waiting {
  std::shared_ptr<Exchange> exchange;
  const std::set<Device>* expected;
  bool is_last;  // arrived last on this rank, so it waits for other ranks
  Time start, deadline;
};

class Table {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // Return the process's table. It is never destroyed, because operators may outlive static
  // destructors.
  static Table& Get();

  // Wait for all contributions and return the reduced numbers. A forward call fills in the ticket
  // for its backward calls. Throws Error.
  Numbers Contribute(const Contribution& own, Ticket* ticket);

  // Expect only these devices from the next forward call on; an empty set means all. No call of
  // the layer may be in flight.
  void SetParticipants(Members* members, const std::set<Device>& participants);
  // Forget the layer's devices. No call of the layer may be in flight.
  void Restart(Members* members);
  // Return for how many seconds a device has waited in this layer so far.
  double WaitSeconds(const Members& members, const Device& device);
  // Return the seconds since the first device arrived at the oldest exchange in flight, or 0 if
  // there is none or after a failure.
  double LongestWait();

  // Fail all exchanges with this text until Reset. A no-op without layers and other ranks. Other
  // ranks receive the text if they may wait for this one: if an exchange with them has begun, or
  // `tell_ranks`.
  void Fail(const std::string& text, bool tell_ranks);
  // Return the text of the failure, or an empty one.
  std::string Failure();
  // Forget all devices, and the failure unless other ranks have received it. Fail must come before,
  // because it ends all waits.
  void Reset();

  void Connect(std::unique_ptr<Transport> transport);
  // Tell the other ranks that this process ends, and end its exchanges with them.
  void Leave();
  // Leave, wait until all other ranks have left or the time is over, and close the transport.
  // Return false if, after a failure, a rank has not left because it hangs or was stopped.
  bool Disconnect(double seconds, double seconds_after_failure);

 protected:  // tests in simulated time call these
  Waiting Arrive(const Contribution& own, Ticket* ticket, Time now);
  bool Serve();
  bool IsOver(Lock* lock, const Waiting& waiting, Time now);

  std::mutex mutex_;
  std::map<Key, std::shared_ptr<Exchange>> exchanges_;  // pending
  Peers peers_;

 private:
  using Shared = std::shared_ptr<Exchange>;

  // Counts the calls of one layer or name over ranks, or all local calls together.
  struct Calls {
    int64_t next = 0;  // the next call's number
    Shared latest;     // the latest exchange for which all devices here have arrived
  };
  Calls& CallsOf(const Key& key) {
    return calls_[{key.is_local, key.is_local ? "" : key.layer, key.phase, 0, 0}];
  }

  Ticket Enter(const Contribution& own, const Key& key);
  Shared Find(const Key& key, const Terms& terms);
  std::string MissingReport(const Waiting& waiting, double seconds, const std::string& where) const;

  void Handle(int from, Message message);
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
  std::map<int, Key> latest_;  // the key of each rank's latest part
  std::string failure_;
  bool failed_for_good_ = false;
  bool notice_given_ = false;  // since the latest Reset
  int64_t resets_ = 0;
};

// The default timeout in seconds: longer than the slowest healthy first step that was seen
// (autotuning, cold caches, a busy machine), yet short enough to wait for the error.
inline std::atomic<double> default_timeout{300.0};

}  // namespace syncbn
