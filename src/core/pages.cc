// madvise(MADV_HUGEPAGE) for one huge page after the other, each faulted in at once, which tells
// how long the system takes for it. Once that is slow, the rest is left to ordinary pages.
#include "core/pages.h"

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <vector>

#include "core/parallel_for.h"

namespace syncbn {

#if defined(MADV_HUGEPAGE)
namespace {

constexpr uintptr_t kHuge = 2 << 20;

double Seconds(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

void ExpectLargeWrite(void* data, size_t bytes) {
  static HugePagePolicy policy;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) & ~(kHuge - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kHuge - 1);
  if (begin >= end || !policy.Asks(Seconds(CLOCK_MONOTONIC))) return;
  const size_t small = static_cast<size_t>(sysconf(_SC_PAGESIZE)), pages = (end - begin) / kHuge;
  std::vector<unsigned char> present((end - begin) / small);
  if (mincore(reinterpret_cast<void*>(begin), end - begin, present.data()) != 0) return;
  const auto is_present = [&](size_t page) { return present[page * (kHuge / small)] & 1; };
  size_t absent = 0;
  for (size_t page = 0; page < pages; ++page) absent += is_present(page) ? 0 : 1;
  if (absent == 0) return;
  ParallelFor(static_cast<int64_t>(pages), [&](int64_t i) {
    const size_t page = static_cast<size_t>(i);
    if (is_present(page) || !policy.Asks(Seconds(CLOCK_MONOTONIC))) return;
    char* const first = reinterpret_cast<char*>(begin + page * kHuge);
    if (madvise(first, kHuge, MADV_HUGEPAGE) != 0) return;
    // Processor time: this thread may have to wait for its turn.
    const double before = Seconds(CLOCK_THREAD_CPUTIME_ID);
    // A write that changes nothing: a read would map the huge page of zeros, which systems before
    // Linux 6.12 then split into small ones.
    char zero = 0;
    __atomic_compare_exchange_n(first, &zero, 0, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    policy.Note(Seconds(CLOCK_THREAD_CPUTIME_ID) - before, Seconds(CLOCK_MONOTONIC));
  });
}
#else
void ExpectLargeWrite(void* /*data*/, size_t /*bytes*/) {}
#endif

}  // namespace syncbn
