// The pending exchanges of a process. Devices contribute here and wait; messages bring the numbers
// of other ranks. docs/design/processes.md explains the design.
//
// A table promises:
// * Devices and ranks may arrive in any order. Equal inputs give equal results, bit for bit, on all
//   devices and ranks and in all runs.
// * Every wait ends with the result or an error. A timeout names the missing devices or ranks.
// * The first failure ends all waits of the process, and all later ones until Reset. A failure that
//   reaches other ranks is permanent on all ranks.
// * A rank that leaves sends a message, and exchanges that need this rank end immediately.
// * A net may move. A layer forgets its devices if it is called on a new device after all
//   num_devices devices have called it and none of them waits. Later calls on them are errors.
#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/environment.h"
#include "exchange/exchange.h"
#include "exchange/peers.h"
#include "exchange/report.h"

namespace syncbn {

// Identifies a forward call on a device. A backward call passes its forward call's ticket.
struct Ticket {
  int64_t number = 0;  // the same on all devices and ranks
  int64_t generation = 0;
};

// The devices of a layer in this process. A Table's mutex guards it.
struct Members {
  explicit Members(std::string name) : layer(std::move(name)) { ++alive; }
  ~Members() { --alive; }
  Members(const Members&) = delete;

  void Forget() {
    devices.clear();
    former.clear();
    ++generation;
  }

  const std::string layer;
  std::set<Device> devices;  // devices that have called the layer
  std::set<Device> former;   // devices that called it before the net moved
  int64_t generation = 0;    // tickets of an earlier generation are invalid
  int64_t resets = 0;        // the value of Table::resets_ in the layer's latest call
  std::map<Device, double> wait_seconds;
  static inline std::atomic<int> alive{0};
};

struct Contribution {
  Phase phase = Phase::kForward;
  Members* members = nullptr;  // null for a gather without a layer (Phase::kCall)
  Device device{};
  std::vector<int64_t> shape{};
  Signature signature{};
  Numbers numbers{};
  size_t devices = 1;                          // how many devices of this process take part
  const std::set<Device>* expected = nullptr;  // the devices, if they are known; only for errors
  std::string shared_name{};                   // the layer's or gather's name, equal on all ranks
  double timeout_seconds = 0;
};

// A device's wait in an exchange.
struct Waiting {
  std::shared_ptr<Exchange> exchange;
  const std::set<Device>* expected;
  bool is_last;  // arrived last on this rank, so it waits for other ranks
  Time start, deadline;
  Members* members;  // null for a sum without a layer
  Device device;
};

// The wait of a rank that has left for the other ranks.
struct Departure {
  Duration patience, patience_after_failure;
  Time start, healthy;  // `healthy` is the latest time without a permanent failure
  bool is_reported = false;
};

class Table {
 public:
  using Lock = std::unique_lock<std::mutex>;

  explicit Table(int arity = 32) : arity_(arity) {}  // see exchange.h

  // The process's table is never destroyed, because operators may outlive static objects.
  static Table& Get();

  // Waits for all contributions and returns the reduced numbers. A forward call sets the ticket for
  // its backward calls. Throws Error.
  Numbers Contribute(Contribution&& own, Ticket* ticket) {
    return Await(Begin(std::move(own), ticket));
  }

  // The parts of Contribute. Begin does not wait. IsReady returns true if Await will not wait; it
  // stays awake for at most `limit` until that is so. Every wait that has begun must be awaited.
  Waiting Begin(Contribution&& own, Ticket* ticket);
  bool IsReady(const Waiting& waiting, Duration limit);
  Numbers Await(Waiting waiting);

  // Forgets the layer's devices. No call may be pending.
  void Restart(Members* members);
  double WaitSeconds(const Members& members, const Device& device);
  // Returns the seconds since the first device arrived at the oldest pending exchange, or 0 if
  // there is none or after a failure.
  double LongestWait();
  // Returns what is pending and who is missing. With GLUON_SYNCBN_STATUS=1 in the environment, also
  // the latest ten exchanges of each layer.
  std::string Status();

  // Fails all exchanges until Reset with the error `text`. Has no effect in a process that has no
  // layers and is not connected. Other ranks receive the text if a device here waits for them, or
  // if `tell_ranks`.
  void Fail(const std::string& text, bool tell_ranks);
  std::string Failure();
  // Forgets all devices, and clears a failure that is not permanent. Fail must be called before.
  void Reset();

  void Connect(std::unique_ptr<Transport> transport);
  // Announces to other ranks that this process ends, and ends its exchanges with them.
  void Leave();
  // Leaves, waits for all other ranks to leave, and closes the transport. After `seconds` it prints
  // which ranks have not left, and waits on, because a rank may be slow. After a permanent failure
  // it waits at most `seconds_after_failure`. Returns false only if a rank then has not left.
  bool Disconnect(double seconds, double seconds_after_failure);

 protected:  // tests in simulated time call these
  using Shared = std::shared_ptr<Exchange>;
  Waiting Arrive(Contribution&& own, Ticket* ticket, Time now);
  bool Serve();
  bool IsOver(Lock* lock, const Waiting& waiting, Time now);
  bool MayClose(Departure* departure, Time now);

  std::mutex mutex_;
  std::map<Key, Shared> exchanges_;  // pending
  std::map<Key, int64_t> next_calls_;
  Peers peers_;
  std::string failure_;
  bool failed_for_good_ = false;
  int64_t resets_ = 0;

 private:
  // Returns the counter of the layer's calls. All layers share one counter if `key.is_local`.
  int64_t& NextCall(const Key& key) {
    return next_calls_[{key.is_local, key.is_local ? "" : key.layer, key.phase}];
  }

  Ticket Enter(const Contribution& own, const Key& key);
  Shared Find(const Key& key, const Terms& terms);
  Duration Patience(const Exchange& exchange) const;
  std::string MissingReport(const Exchange& exchange, const std::set<Device>* expected,
                            double seconds, const std::string* where) const;

  void Handle(int from, Message&& message);
  void Advance(const Shared& exchange);
  void Finish(const Shared& exchange, Numbers result);
  void End(const Shared& exchange, const std::string& error);
  void ServeUntil(Lock* lock, Time deadline, const std::function<bool()>& over);

  void FailLocked(const std::string& text, bool tell_ranks);
  void EndWhere(const std::string& reason, const std::function<bool(const Exchange&)>& ends);
  void CheckLeft(const Exchange& exchange);

  const int arity_;
  std::map<int, Key> latest_;  // {rank: key of the exchange to which it last contributed}
  bool notice_given_ = false;  // a warning about a long wait has been printed
  const bool keeps_history_ = IsSet("GLUON_SYNCBN_STATUS", "1");
  std::map<std::string, std::vector<std::string>> history_;  // {layer: texts}
};

// The default timeout in seconds, longer than slow first steps (autotuning, a busy machine).
inline std::atomic<double> default_timeout{300.0};

}  // namespace syncbn
