// Tests requests for huge pages: they change no content, and pause for a while where they are slow.
#include <sys/mman.h>

#include <cstring>
#include <vector>

#include "check.h"
#include "core/pages.h"

namespace {

constexpr size_t kHuge = 2 << 20;

void TestPauses() {
  syncbn::HugePagePolicy policy;
  CHECK(policy.Asks(0));
  policy.Note(2e-4, 1);
  CHECK(policy.Asks(1));
  policy.Note(0.01, 2);
  CHECK(!policy.Asks(2));
  CHECK(!policy.Asks(2.19));
  CHECK(policy.Asks(2.21));
  policy.Note(1e-4, 3);  // a quick request of another thread
  CHECK(policy.Asks(3));
}

void TestContentStays(size_t offset, size_t bytes) {
  void* const memory =
      mmap(nullptr, 8 * kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  char* const first = static_cast<char*>(memory);
  // Some pages exist already; the others have never been read, and are zeros.
  std::vector<char> expected(8 * kHuge, 0);
  for (char* const content : {first, expected.data()})
    std::memset(content + kHuge / 2, 7, 3 * kHuge);
  syncbn::ExpectLargeWrite(first + offset, bytes);
  CHECK(std::memcmp(expected.data(), first, 8 * kHuge) == 0);
  munmap(memory, 8 * kHuge);
}

}  // namespace

int main() {
  TestPauses();
  TestContentStays(0, 8 * kHuge);
  TestContentStays(16, 6 * kHuge + 100);
  TestContentStays(4096, kHuge);
  syncbn::ExpectLargeWrite(nullptr, 0);
  return check::Result();
}
