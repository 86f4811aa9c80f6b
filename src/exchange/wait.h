// The clock of all deadlines, and the pauses of a thread that waits.
#pragma once
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace syncbn {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Duration = Clock::duration;

// Converts seconds, limited to the range from 0 to 31 years; NaN becomes 0. The clock counts to 292
// years, so no sum of a time and a timeout overflows.
inline Duration ToDuration(double seconds) {
  const std::chrono::duration<double> bounded(std::max(0.0, std::min(seconds, 1e9)));
  return std::chrono::duration_cast<Duration>(bounded);
}

inline double ToSeconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

// Pauses of a waiting thread. A thread stays awake at first, because waking up is slow.
class Pause {
 public:
  // A thread that `carries` messages polls for them between its pauses, so its pauses are short.
  explicit Pause(bool carries) : carries_(carries) {}
  ~Pause() {
    if (slack_ > 0) prctl(PR_SET_TIMERSLACK, slack_);
  }
  Pause(const Pause&) = delete;

  void Restart() { start_ = Clock::now(); }

  // Releases the mutex for one pause. A notification of `changed` ends a sleep, and `over` may end
  // the pause of a thread that is awake. Returns 0, or how long the process was stopped (Ctrl-Z, a
  // debugger) if the pause ends more than a second late. Callers can add this time to a deadline.
  Duration operator()(std::unique_lock<std::mutex>* lock, const std::atomic<bool>& over,
                      std::condition_variable* changed, Time deadline) {
    const Time now = Clock::now();
    const Duration waited = now - start_;
    if (waited < (carries_ ? Duration(kAwakeForMessages) : Duration(kAwake))) {
      lock->unlock();
      std::this_thread::yield();  // another device's thread may need this processor
      while (!carries_ && !over && Clock::now() < start_ + kAwake) std::this_thread::yield();
      lock->lock();
      return {};
    }
    Duration longest = kSleep;
    if (carries_) {
      LowerSlack();
      longest = std::min<Duration>(waited / 16, kSleepForMessages);
    }
    const Time end = now < deadline ? std::min(deadline, now + longest) : now + longest;
    changed->wait_until(*lock, end);
    const Duration late = Clock::now() - end;
    return late > kSleep ? late : Duration();
  }

 private:
  // Linux makes every sleep up to 50 us longer by default, which would slow down an exchange.
  void LowerSlack() {
    if (slack_ > 0) return;
    slack_ = std::max(1, prctl(PR_GET_TIMERSLACK));
    prctl(PR_SET_TIMERSLACK, 1);
  }

  // Threads that call a layer at the same time usually wait for less than kAwake, and processes of
  // one machine for less than kAwakeForMessages, so they do not sleep.
  static constexpr std::chrono::microseconds kAwake{50}, kAwakeForMessages{200};
  static constexpr std::chrono::seconds kSleep{1};
  static constexpr std::chrono::microseconds kSleepForMessages{500};

  const bool carries_;
  Time start_ = Clock::now();
  int slack_ = 0;  // the thread's former slack in nanoseconds, or 0 if unchanged
};

}  // namespace syncbn
