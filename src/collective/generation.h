// A span of time between processes in which exchanges are numbered from zero.
// Who uses it: everything that numbers or sends messages between processes.
#pragma once
#include <cstdint>
#include <tuple>

namespace syncbn {

struct Generation {
  int32_t recoveries = 0;  // from failures
  int32_t joins = 0;       // of all ranks, since the latest recovery
};

inline bool operator<(const Generation& a, const Generation& b) {
  return std::tie(a.recoveries, a.joins) < std::tie(b.recoveries, b.joins);
}
inline bool operator==(const Generation& a, const Generation& b) { return !(a < b) && !(b < a); }

}  // namespace syncbn
