// Payloads and messages as bytes; arrays of numbers as such bytes, and back.
// Who uses it: everything that exchanges numbers. It must not know their meaning.
#pragma once
#include <cstring>
#include <vector>

#include "core/error.h"

namespace syncbn {

using Bytes = std::vector<char>;

template <typename T>
Bytes ToBytes(const std::vector<T>& numbers) {
  Bytes bytes(numbers.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

// Throws Error for bytes that are no whole numbers.
template <typename T>
std::vector<T> FromBytes(const Bytes& bytes) {
  if (bytes.size() % sizeof(T) != 0) {
    throw Error(Concat("a payload of ", bytes.size(), " bytes, expected a multiple of ",
                       sizeof(T)));
  }
  std::vector<T> numbers(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}

}  // namespace syncbn
