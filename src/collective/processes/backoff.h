// The pauses of a thread that polls: none at first, for a fast answer, then sleeps that grow with
// the time waited, so that a long wait takes no processor.
#pragma once
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace syncbn {

class Backoff {
 public:
  Backoff() = default;
  Backoff(const Backoff&) = delete;
  ~Backoff() {
    if (slack_ > 0) prctl(PR_SET_TIMERSLACK, slack_);
  }

  void Pause() {
    const auto waited = std::chrono::steady_clock::now() - start_;
    if (waited < kAwake) {
      std::this_thread::yield();  // a sibling process may need this processor to answer
      return;
    }
    if (slack_ == 0) {
      // By default the shortest sleep takes 50 us on Linux, which would slow down processes that
      // wait for each other in turn.
      slack_ = std::max(1, prctl(PR_GET_TIMERSLACK));
      prctl(PR_SET_TIMERSLACK, 1);
    }
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(waited / 16, kLongest));
  }
  void Restart() { start_ = std::chrono::steady_clock::now(); }

 private:
  // An answer between two processes of one machine takes less; computing takes more.
  static constexpr std::chrono::microseconds kAwake{200};
  static constexpr std::chrono::microseconds kLongest{500};

  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  int slack_ = 0;  // of the thread, in nanoseconds, once it was changed
};

}  // namespace syncbn
