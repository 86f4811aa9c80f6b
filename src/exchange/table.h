// The exchanges of a process: devices bring their parts here, messages bring those of other ranks,
// and every wait ends here.
//
// What a table promises:
// * Exchanges match by key (exchange.h). Devices and ranks may arrive in any order, run ahead of
//   others, and have many exchanges in flight. The same inputs have the same result, bit by bit, on
//   every device and rank and in every run.
// * Every wait ends: with the result, or with an error that names the devices or ranks that are
//   missing. Each rank knows which of its own devices and child ranks it lacks, and says so when
//   the time of the latest device is over. A rank that waits for ranks that have children of their
//   own, or for its parent's answer, gives them a second a level more, so that whoever knows best
//   who is missing speaks first.
// * There is one failure, the first one. It ends all exchanges of the process and all later ones,
//   until Reset. An exchange between ranks fails on all of them, for good: a failure reaches one
//   rank before its update and another one after it, so nobody knows where all would go on.
// * A rank that leaves says so, and exchanges that need it end at once.
// * A net may move: when a device that is no member calls and no device waits, the layer forgets
//   its members. If one of these calls again, too many devices are in use.
//
// There is no thread for messages: whoever waits carries them.
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

// The devices of a call; null for all of a layer.
using Participants = std::shared_ptr<const std::set<Device>>;

// The devices of a layer in this process, of which each has made some forward calls.
class Members {
 public:
  explicit Members(std::string layer) : layer(std::move(layer)) { ++alive; }
  ~Members() { --alive; }
  const std::string layer;

 private:
  friend class Table;
  static inline std::atomic<int> alive{0};

  std::set<Device> Devices() const;
  // All devices continue with the same call.
  void Level();
  // Forgets all devices and calls.
  void Restart();

  std::map<Device, int64_t> next_;     // call of each member
  int64_t start_ = 0;                  // first call of a new member
  std::map<int64_t, int64_t> numbers_; // of the calls that not all devices have made
  std::set<Device> former_;            // before the net moved
  Participants participants_;          // of the next forward calls
  int64_t generation_ = 0;             // grows with each restart
  int64_t resets_ = 0;                 // of the table, that this layer has followed
  std::map<Device, double> wait_seconds_;
};

// A forward call of a device, for its backward calls.
struct Ticket {
  int64_t number = 0;  // that all devices and ranks know it by
  int64_t generation = 0;
  Participants participants{};
};

struct Contribution {
  Phase phase = Phase::kForward;
  Members* members = nullptr;  // of the layer; null for a call of the program
  Device device{};
  std::vector<int64_t> shape{};
  int64_t repeat = 0;
  Signature signature{};
  Numbers numbers{};
  size_t devices = 1;          // of this process, if the ticket names none
  const std::set<Device>* expected = nullptr;  // if the caller knows them; for messages
  std::vector<int> ranks{};  // ascending; empty for all
  std::string shared_name{};  // of the layer or call, equal on all ranks
  double timeout_seconds = 0;
};

// A device that waits in an exchange.
struct Waiting {
  std::shared_ptr<Exchange> exchange;
  const Contribution* own;
  const std::set<Device>* expected;
  bool is_last;  // of this rank's devices, which waits for other ranks
  Time start, deadline, notice;
};

class Table {
 public:
  using Lock = std::unique_lock<std::mutex>;

  Table() = default;
  // The process's. It is never destroyed, because operators may outlive static destructors.
  static Table& Get();

  // Blocks until all others have contributed; returns all numbers, reduced. A forward call makes
  // the ticket, and its backward calls need it. Throws Error.
  Numbers Contribute(const Contribution& own, Ticket* ticket);

  // From the next forward call on, only these devices participate; none means all. Must be called
  // with no call in flight.
  void SetParticipants(Members* members, std::set<Device> participants);
  // Forgets the layer's devices. Must be called with none of its calls in flight.
  void Restart(Members* members);
  // Seconds that a device has waited for other devices and ranks.
  double WaitSeconds(const Members& members, const Device& device);
  // Seconds since the first device arrived at the oldest exchange in flight; 0 if there is none.
  double LongestWait();

  // Ends all exchanges, now and until Reset, with this text; nothing without a layer. Other ranks
  // are told if they may wait for this one: if an exchange with them has begun, or `tell_ranks`.
  void Fail(const std::string& text, bool tell_ranks);
  // Empty if nothing has failed.
  std::string Failure();
  // Forgets the failure, unless other ranks know it, and all devices and exchanges.
  void Reset();

  // The processes that this one was started with.
  void Connect(std::unique_ptr<Transport> transport);
  bool IsConnected() const;
  // Tells the other ranks that this process ends, and ends its exchanges with them.
  void Leave();
  // Leaves, waits until every other rank has left as well or the time is over, and ends the use of
  // the transport. False if something has failed and another rank does not leave: it hangs, or was
  // stopped.
  bool Disconnect(double seconds, double seconds_after_failure);

 protected:  // for tests in simulated time
  Waiting Arrive(const Contribution& own, Ticket* ticket, Time now);
  bool Serve(Lock* lock);
  bool IsOver(Lock* lock, Waiting* waiting, Time now);

  std::mutex mutex_;
  std::map<Key, std::shared_ptr<Exchange>> exchanges_;  // in flight
  std::unique_ptr<Peers> peers_;                        // null before Connect

 private:
  using Shared = std::shared_ptr<Exchange>;

  // The calls of a layer over ranks, or of a name; those in this process alone are counted as one.
  struct Calls {
    int64_t next = 0;      // number
    int64_t complete = 0;  // calls that all devices of this rank have made
    Shared latest;         // the exchange of the last one
  };
  static Key CountedBy(const Key& key) {
    const Phase phase = key.phase == Phase::kCall ? Phase::kCall : Phase::kForward;
    return {key.is_local, key.is_local ? "" : key.layer, phase, 0, 0};
  }
  Calls& CallsOf(const Key& key) { return calls_[CountedBy(key)]; }
  int OwnRank() const { return peers_ ? peers_->rank() : 0; }
  std::vector<int> RanksOf(const Contribution& own) const;

  void Follow(Members* members);
  void Enter(const Contribution& own, Key* key, Ticket* ticket);
  Shared Find(const Key& key, const Terms& terms);
  void Complete(const Contribution& own, const Shared& exchange);
  Duration Patience(const Exchange& exchange) const;
  std::string MissingReport(const Waiting& waiting, double seconds, const std::string& where) const;
  std::string WhatIsKnownOf(const Subtree& child) const;

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
  bool notice_given_ = false;  // since the latest Reset
  int64_t resets_ = 0;
};

// Seconds of layers that have no timeout. Longer than the slowest healthy first step that was seen
// (autotuning, cold caches, a busy machine), and short enough to wait for the message.
inline std::atomic<double> default_timeout{300.0};

}  // namespace syncbn
