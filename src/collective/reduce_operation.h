// Reduce operations by name: each makes one payload of two that are neighbours in order.
// Who uses it: group.cc for devices and exchange.cc for processes; op/ registers its own. A process
// that contributes nothing reduces the payloads of others, so the name travels with the message.
#pragma once
#include <string>

#include "collective/bytes.h"

namespace syncbn {

// lower = lower reduced with higher; `lower` is the payload of the lower devices or ranks.
using ReduceOperation = void (*)(const Bytes& higher, Bytes* lower);

// Makes an operation known; called while the library is loaded.
struct RegisterReduceOperation {
  RegisterReduceOperation(const char* name, ReduceOperation operation);
};

// Throws Error for a name that no one registered. "concat", "sum_float32", "sum_float64" and
// "sum_int64" are always there.
ReduceOperation FindReduceOperation(const std::string& name);

}  // namespace syncbn
