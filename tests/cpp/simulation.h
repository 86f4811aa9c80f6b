// Simulates ranks as tasks of one thread: each has a Protocol, time is simulated, and the network
// delays, loses and refuses messages. Random numbers depend on the seed alone.
// Who uses it: test_many_ranks.cc and test_soak.cc; others make the same contributions.
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "collective/processes/protocol.h"
#include "core/error.h"

namespace simulation {

using syncbn::Bytes;
using syncbn::Duration;
using syncbn::FromBytes;
using syncbn::Protocol;
using syncbn::Time;
using syncbn::ToBytes;
using syncbn::ReduceOperation;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr milliseconds kTimeout{1000};
constexpr std::chrono::hours kLimit{10000};  // of simulated time
// The time after which a rank looks at its deadlines again.
constexpr milliseconds kTick{5};

// A rank's part in an exchange.
inline syncbn::Contribution Of(const std::string& key, Bytes payload,
                               ReduceOperation operation = ReduceOperation::kSumFloat64) {
  syncbn::Contribution own;
  own.key = key;
  own.title = "layer '" + key + "'";
  own.signature = "channels=1";
  own.operation = operation;
  own.timeout_seconds = 1e-3 * kTimeout.count();
  own.payload = std::move(payload);
  return own;
}

struct Rank {
  std::unique_ptr<Protocol> protocol;
  std::function<void()> task;  // continues if it can; called whenever something may have changed
  bool dead = false, paused = false;
  Time resumed{};  // after the latest pause
  std::deque<std::pair<int, Bytes>> inbox;  // while it is paused
};

class Simulation {
 public:
  Simulation(int size, uint32_t seed)
      : random(seed), ranks(size), arrivals_(static_cast<size_t>(size) * size) {
    for (int rank = 0; rank < size; ++rank) {
      const auto send = [this, rank](int to, Bytes message) { Send(rank, to, std::move(message)); };
      ranks[rank].protocol = std::make_unique<Protocol>(rank, size, send);
    }
    After(kTick, [this] { Tick(); });
  }

  int size() const { return static_cast<int>(ranks.size()); }
  Time now() const { return now_; }

  void After(Duration delay, std::function<void()> action) {
    events_.push_back({now_ + delay, scheduled_++, std::move(action)});
    std::push_heap(events_.begin(), events_.end());
  }
  // The rank's task, unless it is dead; a paused one continues later.
  void Resume(int rank) {
    if (!ranks[rank].dead && !ranks[rank].paused && ranks[rank].task) ranks[rank].task();
  }
  // The rank neither hears nor does anything for a while.
  void Pause(int rank, Duration duration) {
    if (ranks[rank].paused) return;
    ranks[rank].paused = true;
    After(duration, [this, rank] {
      ranks[rank].paused = false;
      ranks[rank].resumed = now_;
      std::deque<std::pair<int, Bytes>> inbox;
      inbox.swap(ranks[rank].inbox);
      for (auto& message : inbox) Deliver(rank, message.first, std::move(message.second));
      Resume(rank);
    });
  }

  // Runs until over(); false if that takes longer than kLimit.
  bool RunUntil(const std::function<bool()>& over) {
    const Time end = now_ + kLimit;
    while (!over()) {
      if (events_.front().time > end) return false;
      std::pop_heap(events_.begin(), events_.end());
      const Event event = std::move(events_.back());
      events_.pop_back();
      now_ = event.time;
      event.action();
    }
    return true;
  }

  std::mt19937 random;
  std::vector<Rank> ranks;
  std::function<Duration()> delay = [] { return microseconds(10); };
  std::set<std::pair<int, int>> lost, refused;  // connections, by the lower rank
  bool loses_parts = false;                     // but no other messages

 private:
  struct Event {
    Time time;
    int64_t number;
    std::function<void()> action;
    bool operator<(const Event& other) const {
      return time != other.time ? time > other.time : number > other.number;
    }
  };

  void Send(int from, int to, Bytes bytes) {
    const std::pair<int, int> connection = std::minmax(from, to);
    if (ranks[from].dead || lost.count(connection)) return;
    if (refused.count(connection)) throw syncbn::Error("the connection is reset");
    if (loses_parts && syncbn::Decode(bytes).kind == syncbn::MessageKind::kPart) return;
    // Messages from one rank to another arrive in order.
    Time& arrival = arrivals_[static_cast<size_t>(from) * ranks.size() + to];
    arrival = std::max(arrival, now_ + delay());
    const auto message = std::make_shared<Bytes>(std::move(bytes));
    After(arrival - now_, [this, to, from, message] { Deliver(to, from, std::move(*message)); });
  }

  void Deliver(int to, int from, Bytes bytes) {
    Rank& rank = ranks[to];
    if (rank.dead) return;
    if (rank.paused) {
      rank.inbox.emplace_back(from, std::move(bytes));
      return;
    }
    rank.protocol->Handle(from, bytes, now_);
    Resume(to);
  }

  void Tick() {
    for (int rank = 0; rank < size(); ++rank) {
      if (ranks[rank].dead || ranks[rank].paused) continue;
      ranks[rank].protocol->Tick(now_);
      Resume(rank);
    }
    After(kTick, [this] { Tick(); });
  }

  Time now_{};
  int64_t scheduled_ = 0;
  std::vector<Time> arrivals_;  // the latest, by connection
  std::vector<Event> events_;  // a heap, the next in front
};

// Mostly a network's microseconds, now and then its milliseconds.
inline std::function<Duration()> RandomDelay(Simulation* simulation) {
  return [simulation] {
    const bool slow = simulation->random() % 100 == 0;
    return microseconds(1 + simulation->random() % (slow ? 20000 : 100));
  };
}

}  // namespace simulation
