// The clock of all deadlines, and its durations.
#pragma once
#include <algorithm>
#include <chrono>

namespace syncbn {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Duration = Clock::duration;

// Longer timeouts, infinity included, end after these 31 years. The clock counts to 292 years, so
// no sum of a time and a timeout overflows.
constexpr double kNeverSeconds = 1e9;

// A negative number or NaN becomes zero.
inline Duration ToDuration(double seconds) {
  const std::chrono::duration<double> bounded(std::max(0.0, std::min(seconds, kNeverSeconds)));
  return std::chrono::duration_cast<Duration>(bounded);
}

inline double ToSeconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace syncbn
