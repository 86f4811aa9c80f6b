// Changes bytes at random, as a broken network, another version or a bad file does.
// Who uses it: test_fuzz_messages.cc and test_fuzz_attributes.cc.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>

namespace fuzz {

// The number of cases of a loop: kFull with GLUON_SYNCBN_NATIVE=full, else kBrief.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kBrief = 30000;
#else
constexpr int kBrief = 300000;
#endif
constexpr int kFull = 1000000;

template <typename T, size_t n>
const T& Choose(std::mt19937* random, const T (&from)[n]) {
  return from[(*random)() % n];
}

template <typename Bytes>
Bytes Random(std::mt19937* random, size_t longest) {
  Bytes bytes((*random)() % (longest + 1), 0);
  for (auto& byte : bytes) byte = static_cast<char>((*random)());
  return bytes;
}

// One to three changes: bits, bytes, numbers at the edges of their range, the length, the order.
template <typename Bytes>
void Mutate(std::mt19937* random, Bytes* bytes) {
  constexpr uint64_t kNumbers[] = {0, 1, 7, 0x7fffffff, 0x80000000, 0xffffffff, ~0ull, ~0ull / 2};
  for (uint32_t changes = 1 + (*random)() % 3; changes > 0; --changes) {
    const uint32_t kind = (*random)() % 6;
    const size_t size = bytes->size(), at = size > 0 ? (*random)() % size : 0;
    if (kind == 0 || size == 0) {
      bytes->insert(bytes->end(), 1 + (*random)() % 16, static_cast<char>((*random)()));
    } else if (kind == 1) {
      (*bytes)[at] = static_cast<char>((*bytes)[at] ^ (1 << (*random)() % 8));
    } else if (kind == 2) {
      (*bytes)[at] = static_cast<char>((*random)());
    } else if (kind == 3) {
      bytes->resize(at);
    } else if (kind == 4) {
      std::rotate(bytes->begin(), bytes->begin() + at, bytes->end());
    } else {
      const uint64_t number = Choose(random, kNumbers);
      const size_t place = at / 4 * 4;  // where a head has its numbers
      std::memcpy(&(*bytes)[place], &number,
                  std::min<size_t>(size - place, (*random)() % 2 ? 4 : sizeof(number)));
    }
  }
}

}  // namespace fuzz
