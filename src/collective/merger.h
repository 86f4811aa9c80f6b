// How two adjacent parts of an exchange become one, found by name.
// Who uses it: protocol.cc, for exchange.cc. A process that has nothing to bring merges what others brought, so the
// name travels with the message and every process finds the same function.
#pragma once
#include <string>

#include "collective/wire.h"

namespace syncbn {

// lower = lower merged with higher; `lower` is what processes of lower rank brought.
using Merger = void (*)(const Bytes& higher, Bytes* lower);

// Makes a merger known; called while the library is loaded.
struct RegisterMerger {
  RegisterMerger(const char* name, Merger merger);
};

// Throws Error for a name that no one registered. "concat", "sum_float32", "sum_float64" and
// "sum_int64" are always there.
Merger FindMerger(const std::string& name);

}  // namespace syncbn
