// Ranks as tasks of one thread, each with a Protocol, in simulated time. Random numbers depend on
// the seed alone.
#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <queue>
#include <random>
#include <utility>
#include <vector>

#include "collective/processes/protocol.h"

class Simulation {
 public:
  Simulation(int size, uint32_t seed)
      : random(seed), tasks(size, [] {}), dead(size), arrivals_(size_t{1} * size * size) {
    for (int rank = 0; rank < size; ++rank) {
      ranks.push_back(std::make_unique<syncbn::Protocol>(
          rank, size, [=](int to, syncbn::Bytes bytes) { Send(rank, to, std::move(bytes)); }));
    }
    After(kTick, [this] { Tick(); });
  }

  syncbn::Time now() const { return now_; }
  syncbn::Duration Random(int most_microseconds) {
    return std::chrono::microseconds(random() % most_microseconds);
  }
  void After(syncbn::Duration delay, std::function<void()> action) {
    events_.push({now_ + delay, events_made_++, std::move(action)});
  }
  // False if that takes an hour.
  bool RunUntil(const std::function<bool()>& over) {
    const syncbn::Time end = now_ + std::chrono::hours(1);
    while (!over()) {
      const Event event = events_.top();
      if (event.time > end) return false;
      events_.pop();
      now_ = event.time;
      event.action();
    }
    return true;
  }

  std::mt19937 random;
  std::vector<std::unique_ptr<syncbn::Protocol>> ranks;
  std::vector<std::function<void()>> tasks;  // go on if they can
  std::vector<char> dead;

 private:
  static constexpr std::chrono::milliseconds kTick{5};

  struct Event {
    syncbn::Time time;
    int64_t number;
    std::function<void()> action;
    bool operator<(const Event& other) const {
      return std::make_pair(time, number) > std::make_pair(other.time, other.number);
    }
  };

  // Mostly within a network's microseconds, now and then within its milliseconds; in order.
  void Send(int from, int to, syncbn::Bytes bytes) {
    if (dead[from]) return;
    syncbn::Time& arrival = arrivals_[from * ranks.size() + to];
    arrival = std::max(arrival, now_ + Random(random() % 100 == 0 ? 20000 : 100));
    const auto message = std::make_shared<syncbn::Bytes>(std::move(bytes));
    After(arrival - now_, [=] {
      if (dead[to]) return;
      ranks[to]->Handle(from, *message, now_);
      tasks[to]();
    });
  }
  void Tick() {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (dead[rank]) continue;
      ranks[rank]->Tick(now_);
      tasks[rank]();
    }
    After(kTick, [this] { Tick(); });
  }

  syncbn::Time now_{};
  int64_t events_made_ = 0;
  std::vector<syncbn::Time> arrivals_;  // the latest, by connection
  std::priority_queue<Event> events_;
};
