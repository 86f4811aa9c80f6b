// The messages between processes, their encoding, and all checks of received messages. All
// processes run the same build on the same kind of machine, so numbers keep their bytes. The first
// eight bytes of a message detect another build.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/transport.h"

namespace syncbn {

enum class MessageKind : int32_t {
  kPart,    // child to parent: key, signature, ranks, and the numbers of a subtree
  kResult,  // parent to child: key and numbers
  kFail,    // a text to all ranks: the sender has failed
  kLeave,   // nothing else, to all ranks: the sender's program ends and sends nothing more
};

struct Message {
  MessageKind kind = MessageKind::kPart;
  Key key{};
  Signature signature{};
  std::vector<int> ranks{};  // empty for all ranks
  Numbers numbers{};
  std::string text{};
};

// Throws Error for a message that this version never sends.
[[noreturn]] void Refuse();

Bytes Encode(const Message& message);

// Returns the message that rank `from` of `size` has sent to `rank`; its ranks are never empty.
// Throws Error unless Encode made the bytes, and if a part does not come from a child.
Message Decode(const Bytes& bytes, int from, int rank, int size);

// Throw Error for a duplicate or late part, and for a result that does not answer a part. The
// exchange is null if it is not pending.
void CheckPart(const Exchange& exchange, int from);
void CheckResult(const Exchange* exchange, int from, const Message& result);

}  // namespace syncbn
