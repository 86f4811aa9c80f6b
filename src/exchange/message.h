// The messages between processes, their bytes, and all checks of what another process has sent.
// All processes run one build on one kind of machine, so numbers travel as they lie in memory; a
// differing build is noticed by the first eight bytes.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/transport.h"

namespace syncbn {

enum class MessageKind : int32_t {
  kPart,    // to the parent: key, signature, ranks, and the numbers of a subtree
  kResult,  // to a child: key and numbers
  kFail,    // to all: the sender has failed; text
  kLeave,   // to all: the sender's program ends, and sends nothing more
};

struct Message {
  MessageKind kind = MessageKind::kPart;
  Key key{};
  Signature signature{};
  std::vector<int> ranks{};  // empty for all
  Numbers numbers{};
  std::string text{};
};

// Throws Error for what no process of this version sends.
[[noreturn]] void Refuse();

Bytes Encode(const Message& message);

// The message that rank `from` of `size` has sent to `rank`. Throws Error unless Encode made the
// bytes, and a part comes from a child. Its ranks are never empty.
Message Decode(const Bytes& bytes, int from, int rank, int size);

// Throw Error for a part that came before, or later than those that are reduced, and for a result
// that is none of what was sent to the parent. A null exchange is one that nobody waits for.
void CheckPart(const Exchange& exchange, int from);
void CheckResult(const Exchange* exchange, int from, const Message& result);

}  // namespace syncbn
