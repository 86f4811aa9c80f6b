// A condition variable for mostly short waits: a thread polls for a while before it sleeps, because
// waking a sleeping thread takes longer than a rendezvous of the devices.
// Who uses it: group.cc.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace syncbn {

class Signal {
 public:
  using Lock = std::unique_lock<std::mutex>;
  using Time = std::chrono::steady_clock::time_point;

  // Lets everyone check their condition. The caller holds the mutex.
  void NotifyAll() {
    changes_.fetch_add(1, std::memory_order_release);
    changed_.notify_all();
  }

  // Waits until `over()`, which is called with the mutex held; false if the deadline passes first.
  template <typename Predicate>
  bool WaitUntil(Lock* lock, Time deadline, Predicate over) {
    const Time asleep = std::min(deadline, std::chrono::steady_clock::now() + kAwake);
    while (!over()) {
      if (std::chrono::steady_clock::now() >= asleep) {
        return changed_.wait_until(*lock, deadline, over);
      }
      const uint64_t seen = changes_.load(std::memory_order_relaxed);
      lock->unlock();
      while (changes_.load(std::memory_order_acquire) == seen &&
             std::chrono::steady_clock::now() < asleep) {
        std::this_thread::yield();  // another device may need this processor to arrive at all
      }
      lock->lock();
    }
    return true;
  }

  // Waits until `over()`, however long, asleep.
  template <typename Predicate>
  void Wait(Lock* lock, Predicate over) {
    changed_.wait(*lock, over);
  }

 private:
  // Devices that arrive together take less; where one computes longer, sleeping costs nothing.
  static constexpr std::chrono::microseconds kAwake{50};

  std::condition_variable changed_;
  std::atomic<uint64_t> changes_{0};
};

}  // namespace syncbn
