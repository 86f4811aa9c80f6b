// How a thread waits that has to look by itself: briefly at once, for a fast answer, then with
// sleeps that grow with the time waited, so that a long wait costs no processor.
// Who uses it: communicator.cc.
#pragma once
#include <algorithm>
#include <chrono>
#include <thread>

namespace syncbn {

class Backoff {
 public:
  void Pause() {
    const auto waited = std::chrono::steady_clock::now() - start_;
    if (waited < kAwake) {
      std::this_thread::yield();  // a sibling process may need this processor to answer
    } else {
      std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(waited / 16, kLongest));
    }
  }
  void Restart() { start_ = std::chrono::steady_clock::now(); }

 private:
  // An answer between two processes of one machine takes less; computing takes more.
  static constexpr std::chrono::microseconds kAwake{100};
  static constexpr std::chrono::microseconds kLongest{500};

  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace syncbn
