// The messages between processes, and their bytes; and the part of a process in an exchange.
// All processes run one build on one kind of machine, so numbers travel as they lie in memory; a
// differing build is noticed by the first eight bytes.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "collective/common/bytes.h"
#include "collective/common/reduce_operation.h"

namespace syncbn {

// All ranks of an exchange have the same of this.
struct Agreement {
  std::string key;        // used once: exchanges match by it, not by their order
  std::string title;      // begins messages: "SyncBatchNorm 'norm0', forward"
  std::string signature;  // "channels=64, dtype=float32"
  ReduceOperation operation = ReduceOperation::kSumFloat64;
  std::vector<int> ranks;  // ascending; empty for all
};

// One process's part in an exchange.
struct Contribution : Agreement {
  double timeout_seconds = 0;
  Bytes payload;
};

enum class MessageKind : int32_t {
  kPart,    // to the parent in an exchange's tree: agreement, and the payload of a subtree
  kResult,  // back to a child: key and payload
  kLate,    // to the parent or a child: time is over, who is missing? Key, and milliseconds waited
  kFail,    // to all: the sender has failed; text
  kLeave,   // to all: the sender's program ends, nothing follows
};

struct Message : Agreement {
  explicit Message(MessageKind which = MessageKind::kPart) : kind(which) {}

  MessageKind kind;
  int64_t number = 0;  // of milliseconds
  std::string text;
  Bytes payload;
};

// Throws the Error of a message that no process of this version sends.
[[noreturn]] void Refuse();

Bytes Encode(const Message& message);
// Throws Error for bytes that Encode of this version does not make.
Message Decode(const Bytes& bytes);

}  // namespace syncbn
