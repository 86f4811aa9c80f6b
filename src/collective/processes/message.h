// The messages between processes, and their bytes.
// Who uses it: protocol.cc and its parts. All processes run one build on one kind of machine, so
// numbers travel as they lie in memory; a differing build is noticed by the first eight bytes.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "collective/processes/process_group.h"

namespace syncbn {

enum class MessageKind : int32_t {
  kPart,    // part of an exchange: key, title, signature, operation, ranks, step, payload
  kFail,    // the sender's generation has failed: text
  kJoin,    // the sender contributes nothing more in this generation: number of its exchanges
  kLeave,   // the sender's program ends, nothing follows
  kQuery,   // have you reached `key`? The answer carries the same number
  kStatus,  // the answer: step is 1 for yes, text says what the sender does
};

// In place of the step of an exchange: begin, if you have joined.
constexpr int kInvitation = -1;

struct Message {
  MessageKind kind = MessageKind::kPart;
  Generation generation;  // the sender's
  int32_t step = 0;  // see exchange.cc, or kInvitation
  bool empty = false;  // no rank in this part contributed data
  int64_t number = 0;
  ReduceOperation operation = ReduceOperation::kConcat;
  std::string key, title, signature, text;
  std::vector<int32_t> ranks;  // ascending; empty for all
  Bytes payload;
};

Bytes Encode(const Message& message);
// Throws Error for bytes that Encode of this version does not make.
Message Decode(const Bytes& bytes);

}  // namespace syncbn
