// Seconds that a user gave as a duration of the clock.
// Who uses it: whoever waits with a deadline.
#pragma once
#include <algorithm>
#include <chrono>

namespace syncbn {

// Timeouts from here on, infinity included, mean never: they end after 31 years. The clock counts
// to 292, so no sum of a time and a timeout overflows.
constexpr double kNeverSeconds = 1e9;

// Zero for what is no positive number.
inline std::chrono::steady_clock::duration ToDuration(double seconds) {
  const std::chrono::duration<double> bounded(std::max(0.0, std::min(seconds, kNeverSeconds)));
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(bounded);
}

}  // namespace syncbn
