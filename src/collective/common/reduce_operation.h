// The reductions of two payloads that are neighbours in the order of devices or ranks. It must not
// know whose payloads they are.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "collective/common/bytes.h"

namespace syncbn {

// Numbers travel in messages: a process that contributes nothing reduces the payloads of others.
enum class ReduceOperation : int32_t { kConcat, kSumFloat64, kMoments };

inline bool IsReduceOperation(int32_t number) {
  return 0 <= number && number <= static_cast<int32_t>(ReduceOperation::kMoments);
}

// Devices of one process hand over numbers, or text.
struct Payload {
  std::vector<double> numbers{};
  std::string text{};
};

// lower = lower reduced with higher; `lower` is the payload of the lower devices or ranks. Bytes are
// those of text, or of numbers. Throws Error for payloads that do not fit together.
void Reduce(ReduceOperation operation, const Payload& higher, Payload* lower);
void Reduce(ReduceOperation operation, const Bytes& higher, Bytes* lower);

}  // namespace syncbn
