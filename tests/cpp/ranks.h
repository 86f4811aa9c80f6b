// Tables that stand for the ranks of one program, and the messages between them. The ranks belong
// to threads, or to one thread in simulated time, where random numbers depend only on the seed.
#pragma once
#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <queue>
#include <random>
#include <utility>
#include <vector>

#include "exchange/table.h"

// The messages that have arrived.
struct Network {
  explicit Network(int size) : queues(static_cast<size_t>(size)) {}

  void Deliver(int from, int to, syncbn::Bytes message) {
    std::lock_guard<std::mutex> lock(mutex);
    queues[static_cast<size_t>(to)].emplace_back(from, std::move(message));
  }

  std::mutex mutex;
  std::vector<std::deque<std::pair<int, syncbn::Bytes>>> queues;  // one for each receiver
  std::function<void(int from, int to, syncbn::Bytes message)> send =
      [this](int from, int to, syncbn::Bytes message) { Deliver(from, to, std::move(message)); };
};

class LocalTransport : public syncbn::Transport {
 public:
  LocalTransport(std::shared_ptr<Network> network, int rank)
      : network_(std::move(network)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(network_->queues.size()); }
  void Send(int to, syncbn::Bytes message) override {
    network_->send(rank_, to, std::move(message));
  }
  bool Receive(int* from, syncbn::Bytes* message) override {
    std::lock_guard<std::mutex> lock(network_->mutex);
    auto& queue = network_->queues[static_cast<size_t>(rank_)];
    if (queue.empty()) return false;
    *from = queue.front().first;
    *message = std::move(queue.front().second);
    queue.pop_front();
    return true;
  }
  bool Busy() const override { return false; }
  void Close() override {}
  void OnClose(std::function<bool()>) override {}

 private:
  const std::shared_ptr<Network> network_;
  const int rank_;
};

class Rank : public syncbn::Table {
 public:
  Rank(const std::shared_ptr<Network>& network, int rank) {
    Connect(std::make_unique<LocalTransport>(network, rank));
  }
  using Table::Arrive;
  void ServeAll() {
    Lock lock(mutex_);
    Serve(&lock);
  }
  bool IsOver(syncbn::Waiting* waiting, syncbn::Time now) {
    Lock lock(mutex_);
    Serve(&lock);
    return Table::IsOver(&lock, waiting, now);
  }
  bool AllHaveLeft() const { return peers_.AllHaveLeft(); }
  size_t InFlight() const { return exchanges_.size(); }
};

// Actors of one thread in simulated time, several for each rank.
class Simulation {
 public:
  Simulation(int size, uint32_t seed)
      : random(seed), dead(static_cast<size_t>(size)), arrivals_(dead.size() * dead.size()) {
    const auto network = std::make_shared<Network>(size);
    for (int rank = 0; rank < size; ++rank) ranks.push_back(std::make_unique<Rank>(network, rank));
    Network* const messages = network.get();
    network->send = [=](int from, int to, syncbn::Bytes bytes) {
      if (dead[from]) return;
      // Messages arrive in order, mostly within microseconds, now and then within milliseconds.
      syncbn::Time& arrival = arrivals_[from * dead.size() + to];
      arrival = std::max(arrival, now_ + Random(random() % 100 == 0 ? 20000 : 100));
      const auto shared = std::make_shared<syncbn::Bytes>(std::move(bytes));
      After(arrival - now_, [=] {
        messages->Deliver(from, to, std::move(*shared));
        if (!dead[to]) wake(to);
      });
    };
    After(kTick, [this] { Tick(); });
  }

  syncbn::Time now() const { return now_; }
  syncbn::Duration Random(uint32_t most_microseconds) {
    return std::chrono::microseconds(random() % most_microseconds);
  }
  void After(syncbn::Duration delay, std::function<void()> action) {
    events_.push({now_ + delay, events_made_++, std::move(action)});
  }
  // Return false if it takes an hour.
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
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<char> dead;
  std::function<void(int rank)> wake = [](int) {};  // the rank's actors go on

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

  void Tick() {
    for (size_t rank = 0; rank < dead.size(); ++rank) {
      if (!dead[rank]) wake(static_cast<int>(rank));
    }
    After(kTick, [this] { Tick(); });
  }

  syncbn::Time now_{std::chrono::hours(1)};
  int64_t events_made_ = 0;
  std::vector<syncbn::Time> arrivals_;  // the latest one of each connection
  std::priority_queue<Event> events_;
};
