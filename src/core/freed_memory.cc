#include "core/freed_memory.h"

#include <malloc.h>

#include <cstdlib>
#include <string>

namespace syncbn {
namespace {

bool TellTheLibrary() {
  const char* const setting = std::getenv("GLUON_SYNCBN_KEEP_MEMORY");
  if (setting != nullptr && std::string(setting) == "0") return false;
#if defined(__GLIBC__)
  // Threads other than the first allocate from heaps of 64 MB. An empty heap is unmapped whatever
  // M_TRIM_THRESHOLD says, unless the padding is as large as a heap.
  constexpr int kHeap = 64 << 20;
  return mallopt(M_MMAP_MAX, 0) == 1 && mallopt(M_TRIM_THRESHOLD, -1) == 1 &&
         mallopt(M_TOP_PAD, kHeap) == 1;
#else
  return false;
#endif
}

}  // namespace

bool KeepFreedMemory() {
  static const bool kept = TellTheLibrary();
  return kept;
}

}  // namespace syncbn
