// Transports between threads that stand for processes.
#pragma once
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "collective/processes/transport.h"

// The messages that are under way.
struct Network {
  explicit Network(int size) : size(size), queues(size) {}
  const int size;
  std::mutex mutex;
  std::vector<std::deque<std::pair<int, syncbn::Bytes>>> queues;  // by receiver
};

class LocalTransport : public syncbn::Transport {
 public:
  LocalTransport(std::shared_ptr<Network> network, int rank)
      : network_(std::move(network)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return network_->size; }
  void Send(int to, syncbn::Bytes message) override {
    std::lock_guard<std::mutex> lock(network_->mutex);
    network_->queues[to].emplace_back(rank_, std::move(message));
  }
  bool Receive(int* from, syncbn::Bytes* message) override {
    std::lock_guard<std::mutex> lock(network_->mutex);
    auto& queue = network_->queues[rank_];
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
