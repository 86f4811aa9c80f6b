// The messages between processes, and their bytes; and the part of a process in an exchange.
// Who uses it: protocol.cc and its parts. All processes run one build on one kind of machine, so
// numbers travel as they lie in memory; a differing build is noticed by the first eight bytes.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "collective/common/bytes.h"
#include "collective/common/reduce_operation.h"

namespace syncbn {

// The span of time in which calls are numbered from zero.
struct Generation {
  int32_t recoveries = 0;  // from failures
  int32_t joins = 0;       // of all ranks, since the latest recovery
};

inline bool operator<(const Generation& a, const Generation& b) {
  return std::tie(a.recoveries, a.joins) < std::tie(b.recoveries, b.joins);
}
inline bool operator==(const Generation& a, const Generation& b) { return !(a < b) && !(b < a); }

// The part of an exchange that is equal on all of its ranks.
struct Agreement {
  std::string key;        // used once in a generation: exchanges match by it, not by their order
  std::string title;      // begins messages: "SyncBatchNorm 'norm0', forward"
  std::string signature;  // "channels=64, dtype=float32"
  ReduceOperation operation = ReduceOperation::kSumFloat64;
  std::vector<int> ranks;  // of the exchange, ascending; empty for all
};

// One process's part in an exchange.
struct Contribution : Agreement {
  double timeout_seconds = 0;
  Bytes payload;
};

enum class MessageKind : int32_t {
  kPart,    // part of an exchange: its agreement, step, empty, payload
  kFail,    // the sender's generation has failed: text
  kJoin,    // the sender contributes nothing more in this generation: number of its exchanges
  kLeave,   // the sender's program ends, nothing follows
  kQuery,   // have you reached `key`? The answer carries the same number
  kStatus,  // the answer: step is 1 for yes, text says what the sender does
};

// In place of the step of an exchange: begin, if you have joined.
constexpr int kInvitation = -1;

struct Message : Agreement {
  explicit Message(MessageKind of = MessageKind::kPart) : kind(of) {}

  MessageKind kind;
  Generation generation;  // the sender's
  int32_t step = 0;       // see exchange.cc, or kInvitation
  int32_t empty = 0;      // 1: no rank in this part contributed data
  int64_t number = 0;
  std::string text;
  Bytes payload;
};

struct Received {
  int from = 0;
  Message message;
};
using ReceivedByKey = std::map<std::string, std::vector<Received>>;

Bytes Encode(const Message& message);
// Throws Error for bytes that Encode of this version does not make.
Message Decode(const Bytes& bytes);

}  // namespace syncbn
