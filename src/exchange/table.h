// The pending exchanges of a process. Devices contribute parts, messages bring the parts of other
// ranks, and every wait ends here.
//
// A table guarantees the following:
// * Exchanges match by key (exchange.h). Devices and ranks may arrive in any order, run ahead of
//   others, and have many pending exchanges. The same inputs have the same result, bit by bit, on
//   every device and rank and in every run.
// * Every wait ends with the result, or with an error that names the missing devices or ranks. Each
//   rank reports its own missing devices and child ranks after the timeout of the latest device. A
//   rank that waits for children with children, or for its parent's answer, waits a second longer
//   for each level, so that the rank with the most precise report raises the error.
// * There is one failure, the first. It ends all pending and later exchanges of the process, until
//   Reset. An exchange between ranks fails on all ranks, permanently: a failure reaches one rank
//   before its update and another after it, so the ranks have no common state to continue from.
// * A rank reports that it leaves, and exchanges that need it end immediately.
// * A net may move: if a new device calls and no device waits, the layer forgets its members. If a
//   former member calls again, more devices than num_devices are in use.
//
// There is no thread for messages: waiting threads carry them.
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

// The devices of a call; null for all devices of a layer.
using Participants = std::shared_ptr<const std::set<Device>>;

// The devices of a layer in this process, and their numbers of forward calls.
class Members {
 public:
  explicit Members(std::string layer) : layer(std::move(layer)) { ++alive; }
  ~Members() { --alive; }
  const std::string layer;

 private:
  friend class Table;
  static inline std::atomic<int> alive{0};

  std::set<Device> Devices() const;
  // Makes all devices continue with the same call.
  void Level();
  // Forgets all devices and calls.
  void Restart();

  std::map<Device, int64_t> next_call_;      // each member's next call
  int64_t first_call_ = 0;                   // a new member's first call
  std::map<int64_t, int64_t> call_numbers_;  // shared numbers of calls that some devices still lack
  std::set<Device> former_;                  // members before the net moved
  Participants participants_;                // devices of the next forward calls
  int64_t generation_ = 0;                   // number of restarts
  int64_t resets_ = 0;                       // resets of the table that this layer has followed
  std::map<Device, double> wait_seconds_;
};

// A forward call of a device; its backward calls need the ticket.
struct Ticket {
  int64_t number = 0;  // equal on all devices and ranks
  int64_t generation = 0;
  Participants participants{};
};

struct Contribution {
  Phase phase = Phase::kForward;
  Members* members = nullptr;  // the layer's devices; null for a named call
  Device device{};
  std::vector<int64_t> shape{};
  int64_t repeat = 0;
  Signature signature{};
  Numbers numbers{};
  size_t devices = 1;  // number of devices in this process; the ticket's participants override it
  const std::set<Device>* expected = nullptr;  // these devices if known, for messages
  std::vector<int> ranks{};                    // ascending; empty for all ranks
  std::string shared_name{};                   // name of the layer or call on all ranks
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
  // The table of the process. It is never destroyed, because operators may outlive static objects.
  static Table& Get();

  // Blocks until all places have contributed, and returns the reduced numbers. A forward call sets
  // the ticket, and its backward calls need it. Throws Error.
  Numbers Contribute(const Contribution& own, Ticket* ticket);

  // Lets only these devices participate in later forward calls; an empty set means all devices. No
  // call may be pending.
  void SetParticipants(Members* members, std::set<Device> participants);
  // Forgets the layer's devices. None of its calls may be pending.
  void Restart(Members* members);
  // Returns the seconds that a device has waited for other devices and ranks.
  double WaitSeconds(const Members& members, const Device& device);
  // Returns the seconds since the first device arrived at the oldest pending exchange, or 0.
  double LongestWait();

  // Ends all pending exchanges, and later ones until Reset, with this error. A no-op without a
  // layer. Reports the error to other ranks if `notify_ranks`, or if an exchange with them has
  // begun.
  void Fail(const std::string& text, bool notify_ranks);
  // Returns the error of the failure, or an empty text.
  std::string Failure();
  // Forgets all devices and exchanges, and the failure unless it was reported to other ranks.
  void Reset();

  // Sets the transport to the other ranks.
  void Connect(std::unique_ptr<Transport> transport);
  bool IsConnected() const;
  // Reports to the other ranks that this process ends, and ends its exchanges with them.
  void Leave();
  // Leaves, waits until all other ranks have left or the time is over, and closes the transport.
  // Returns false if there was a failure and another rank, which hangs or was stopped, did not
  // leave.
  bool Disconnect(double seconds, double seconds_after_failure);

 protected:  // tests use these in simulated time
  Waiting Arrive(const Contribution& own, Ticket* ticket, Time now);
  bool Serve(Lock* lock);
  bool IsOver(Lock* lock, Waiting* waiting, Time now);

  std::mutex mutex_;
  std::map<Key, std::shared_ptr<Exchange>> exchanges_;  // pending
  std::unique_ptr<Peers> peers_;                        // null before Connect

 private:
  using Shared = std::shared_ptr<Exchange>;

  // The calls of a layer over ranks, or of a named call. All local calls share one counter.
  struct Calls {
    int64_t next = 0;      // number of the next call
    int64_t complete = 0;  // number of calls that all devices of this rank have made
    Shared latest;         // the exchange of the latest complete call
  };
  static Key CounterOf(const Key& key) {
    const Phase phase = key.phase == Phase::kCall ? Phase::kCall : Phase::kForward;
    return {key.is_local, key.is_local ? "" : key.layer, phase, 0, 0};
  }
  Calls& CallsOf(const Key& key) { return calls_[CounterOf(key)]; }
  int OwnRank() const { return peers_ ? peers_->rank() : 0; }
  std::vector<int> RanksOf(const Contribution& own) const;

  void Follow(Members* members);
  void Enter(const Contribution& own, Key* key, Ticket* ticket);
  Shared Find(const Key& key, const Terms& terms);
  void Complete(const Contribution& own, const Shared& exchange);
  Duration Patience(const Exchange& exchange) const;
  std::string MissingReport(const Waiting& waiting, double seconds, const std::string& where) const;
  std::string Describe(const Subtree& child) const;

  void Handle(int from, Message message, const std::string& where);
  void Advance(const Shared& exchange);
  void Finish(const Shared& exchange, Numbers result);
  void End(const Shared& exchange, const std::string& error);
  template <typename Predicate>
  void EndWhere(const std::string& reason, const Predicate& ends);

  void FailLocked(const std::string& text, bool notify_ranks);
  void CheckLeft(const Exchange& exchange);
  template <typename Predicate>
  void ServeUntil(Lock* lock, double seconds, const Predicate& over);

  std::map<Key, Calls> calls_;
  std::string failure_;
  bool failed_for_good_ = false;
  bool notice_given_ = false;  // a notice was printed since the latest Reset
  int64_t resets_ = 0;
};

// The timeout in seconds of layers without one. It is longer than the slowest first step measured
// (autotuning, cold caches, a busy machine), and short enough that users wait for the message.
inline std::atomic<double> default_timeout{300.0};

}  // namespace syncbn
