// madvise(MADV_HUGEPAGE): changes no content, and costs next to nothing for memory that has it.
#include "core/pages.h"

#include <sys/mman.h>

#include <cstdint>

namespace syncbn {

void ExpectLargeWrite(void* data, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t huge = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + huge - 1) & ~(huge - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(huge - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace syncbn
