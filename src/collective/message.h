// The format of what processes send each other.
// Who uses it: protocol.cc. All processes run one build on one kind of machine, so numbers
// travel as they lie in memory; a differing build is noticed by the first four bytes.
#pragma once
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "collective/wire.h"

namespace syncbn {

// A span of time in which exchanges are numbered from zero. `generation` counts recoveries from a
// failure, `joins` how often all ranks have joined.
struct Era {
  int32_t generation = 0;
  int32_t joins = 0;
};

inline bool operator<(const Era& a, const Era& b) {
  return std::tie(a.generation, a.joins) < std::tie(b.generation, b.joins);
}
inline bool operator==(const Era& a, const Era& b) { return !(a < b) && !(b < a); }

enum class MessageKind : int32_t {
  kPart,    // of an exchange: key, contract, merger, ranks, step, payload
  kFail,    // the sender's era has failed: contract holds the text
  kJoin,    // the sender brings nothing more in this era: number is the count of its exchanges
  kLeave,   // the sender's program ends, nothing follows
  kQuery,   // have you come to `key`? number comes back in the answer
  kStatus,  // the answer: step is 1 for yes, contract says what the sender does
};

// In place of the step of an exchange: begin, if you have joined.
constexpr int kInvitation = -1;

struct Message {
  MessageKind kind = MessageKind::kPart;
  Era era;
  int32_t step = 0;  // see exchange.cc, or kInvitation
  bool empty = false;  // none of the ranks behind this part had anything to bring
  int64_t number = 0;
  std::string key, title, contract, merger;
  std::vector<int32_t> ranks;  // ascending; empty for all
  Bytes payload;
};

Bytes Encode(const Message& message);
// Throws Error for bytes that Encode of this version does not make.
Message Decode(const Bytes& bytes);

}  // namespace syncbn
