#include "core/freed_memory.h"

#include <malloc.h>

#include <cstdlib>
#include <string>

namespace syncbn {

void KeepFreedMemory() {
#if defined(__GLIBC__)
  static const bool is_kept = [] {
    const char* const setting = std::getenv("GLUON_SYNCBN_KEEP_MEMORY");
    if (setting != nullptr && std::string(setting) == "0") return false;
    // Threads other than the first allocate from heaps of 64 MB. An empty heap is unmapped whatever
    // M_TRIM_THRESHOLD says, unless the padding is as large as a heap.
    constexpr int kHeap = 64 << 20;
    return mallopt(M_MMAP_MAX, 0) == 1 && mallopt(M_TRIM_THRESHOLD, -1) == 1 &&
           mallopt(M_TOP_PAD, kHeap) == 1;
  }();
  static_cast<void>(is_kept);
#endif
}

}  // namespace syncbn
