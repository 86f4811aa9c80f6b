// Ranks of a program in one process. A rank is a Table (exchange/table.h), and a Network stores the
// messages. Each device has a thread, or one thread runs all ranks in simulated time.
#pragma once
#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "exchange/table.h"

// Messages that have been sent and not received.
struct Network {
  explicit Network(int size) : queues(static_cast<size_t>(size)) {}

  void Send(int from, int to, syncbn::Bytes message) {
    std::lock_guard<std::mutex> lock(mutex);
    queues.at(static_cast<size_t>(to)).emplace_back(from, std::move(message));
  }

  std::mutex mutex;
  std::atomic<bool> is_busy{false};  // messages are still being sent
  std::mt19937* random = nullptr;
  std::vector<std::deque<std::pair<int, syncbn::Bytes>>> queues;  // one for each receiver
};

class LocalTransport : public syncbn::Transport {
 public:
  LocalTransport(std::shared_ptr<Network> network, int rank)
      : network_(std::move(network)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(network_->queues.size()); }
  void Send(int to, syncbn::Bytes message) override {
    network_->Send(rank_, to, std::move(message));
  }
  // Messages of one sender stay in order. If `random` is set, messages of different senders arrive
  // in any order, and some messages are late. If `sender` is a rank, only its next message arrives.
  bool Receive(int* from, syncbn::Bytes* message) override {
    std::lock_guard<std::mutex> lock(network_->mutex);
    auto& queue = network_->queues.at(static_cast<size_t>(rank_));
    std::mt19937* const random = network_->random;
    if (queue.empty() || (random != nullptr && (*random)() % 8 == 0)) return false;
    *from = queue[random == nullptr ? 0 : (*random)() % queue.size()].first;
    if (sender != kAll) *from = std::exchange(sender, kNone);
    const auto next = std::find_if(queue.begin(), queue.end(),
                                   [&](const auto& entry) { return entry.first == *from; });
    if (next == queue.end()) return false;
    *message = std::move(next->second);
    queue.erase(next);
    return true;
  }
  bool Busy() const override { return network_->is_busy; }
  void Close() override {}
  void OnFinalize(std::function<bool()>) override {}

  static constexpr int kAll = -1, kNone = -2;
  int sender = kAll;

 private:
  const std::shared_ptr<Network> network_;
  const int rank_;
};

// A rank with two layers.
class Rank : public syncbn::Table {
 public:
  Rank(const std::shared_ptr<Network>& with, int rank, int arity = 32)
      : Table(arity), number(rank), network(with), transport(new LocalTransport(with, rank)) {
    Connect(std::unique_ptr<LocalTransport>(transport));
  }
  using Table::Arrive;
  using Table::MayClose;
  bool IsOver(const syncbn::Waiting& waiting, syncbn::Time now) {
    Lock lock(mutex_);
    Serve();
    return Table::IsOver(&lock, waiting, now);
  }
  // Makes the rank receive a message. Returns the text of its failure, or an empty text.
  std::string Handle(int from, const syncbn::Bytes& bytes) {
    network->Send(from, number, bytes);
    return Failure();
  }
  bool HasLeft() {
    Lock lock(mutex_);
    return peers_.has_left();
  }
  bool AllHaveLeft() const { return peers_.AllHaveLeft(); }
  size_t InFlight() const { return exchanges_.size(); }

  const int number;
  const std::shared_ptr<Network> network;
  LocalTransport* const transport;
  syncbn::Members layers[2] = {syncbn::Members("all"), syncbn::Members("some")};
};

// Returns the contribution of the device cpu(id) to a layer's exchange.
inline syncbn::Contribution ContributionOf(syncbn::Members* members, int id = 0,
                                           double number = 1) {
  syncbn::Contribution own;
  own.members = members;
  own.device = {"cpu", id};
  own.shape = {id};
  own.signature.channels = 1;
  own.numbers = {number};
  own.shared_name = members->layer;
  own.timeout_seconds = 60;
  return own;
}
