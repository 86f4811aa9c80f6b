// Numbers of a round as bytes of a message, and back.
// Who uses it: group.cc and op/reducers.cc.
#pragma once
#include <cstring>
#include <vector>

#include "collective/wire.h"
#include "core/error.h"

namespace syncbn {

using Payload = std::vector<double>;

inline Bytes ToBytes(const Payload& payload) {
  Bytes bytes(payload.size() * sizeof(double));
  if (!bytes.empty()) std::memcpy(bytes.data(), payload.data(), bytes.size());
  return bytes;
}

// Throws Error for bytes that are no whole numbers.
inline Payload ToPayload(const Bytes& bytes) {
  if (bytes.size() % sizeof(double) != 0) {
    throw Error(Concat("a payload of ", bytes.size(), " bytes, expected a multiple of ",
                       sizeof(double)));
  }
  Payload payload(bytes.size() / sizeof(double));
  if (!bytes.empty()) std::memcpy(payload.data(), bytes.data(), bytes.size());
  return payload;
}

}  // namespace syncbn
