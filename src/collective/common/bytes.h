// Payloads and messages as bytes; arrays of numbers as such bytes, and back. It must not know their
// meaning.
#pragma once
#include <vector>

#include "core/error.h"

namespace syncbn {

using Bytes = std::vector<char>;

template <typename T>
void AppendBytes(const T* numbers, size_t size, Bytes* bytes) {
  const char* const begin = reinterpret_cast<const char*>(numbers);
  bytes->insert(bytes->end(), begin, begin + size * sizeof(T));
}

template <typename T>
Bytes ToBytes(const std::vector<T>& numbers) {
  Bytes bytes;
  AppendBytes(numbers.data(), numbers.size(), &bytes);
  return bytes;
}

// Throws Error for bytes that are no whole numbers.
template <typename T>
std::vector<T> FromBytes(const Bytes& bytes) {
  if (bytes.size() % sizeof(T) != 0) {
    throw Error(Concat("a payload of ", bytes.size(), " bytes, expected a multiple of ",
                       sizeof(T)));
  }
  // operator new aligns them for every arithmetic type.
  const T* const begin = reinterpret_cast<const T*>(bytes.data());
  return std::vector<T>(begin, begin + bytes.size() / sizeof(T));
}

}  // namespace syncbn
