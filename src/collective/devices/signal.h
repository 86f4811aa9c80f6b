// A condition variable for mostly short waits: a thread polls for a while before it sleeps, because
// waking a sleeping thread takes longer than a rendezvous of the devices.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "collective/common/timeout.h"

namespace syncbn {

class Signal {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // Lets everyone check their condition. The caller holds the mutex.
  void NotifyAll() {
    changes_.fetch_add(1, std::memory_order_release);
    changed_.notify_all();
  }

  // Waits until `over()`, which is called with the mutex held; false if the deadline passes first.
  // Time in which the process is stopped (Ctrl-Z, a debugger, a suspended job) moves the deadline,
  // because no device can arrive in it.
  template <typename Predicate>
  bool WaitUntil(Lock* lock, Time deadline, Predicate over) {
    const Time asleep = std::min(deadline, Clock::now() + kAwake);
    while (!over()) {
      if (Clock::now() >= asleep) return Sleep(lock, asleep, deadline, over);
      const uint64_t seen = changes_.load(std::memory_order_relaxed);
      lock->unlock();
      while (changes_.load(std::memory_order_acquire) == seen && Clock::now() < asleep) {
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
  // `end` is the time at which this thread should be awake.
  template <typename Predicate>
  bool Sleep(Lock* lock, Time end, Time deadline, Predicate over) {
    while (true) {
      const Time now = Clock::now();
      if (now > end + kSleep) deadline += now - end;
      if (over()) return true;
      if (now >= deadline) return false;
      end = std::min(deadline, now + kSleep);
      changed_.wait_until(*lock, end);
    }
  }

  // Devices that arrive together take less; where one computes longer, sleeping costs nothing.
  static constexpr std::chrono::microseconds kAwake{50};
  static constexpr std::chrono::seconds kSleep{1};

  std::condition_variable changed_;
  std::atomic<uint64_t> changes_{0};
};

}  // namespace syncbn
