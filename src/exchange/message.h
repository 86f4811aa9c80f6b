// The messages between processes, their bytes, and all checks of received messages. All processes
// run one build on one kind of machine, so bytes are copied from memory. The first eight bytes
// reveal another build.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/transport.h"

namespace syncbn {

enum class MessageKind : int32_t {
  kPart,    // the parent receives key, signature, ranks, and the numbers of a subtree
  kResult,  // a child receives key and numbers
  kFail,    // all receive the text of the sender's failure
  kLeave,   // the sender's program ends, and sends nothing more
};

struct Message {
  MessageKind kind = MessageKind::kPart;
  Key key{};
  Signature signature{};
  std::vector<int> ranks{};  // empty for all
  Numbers numbers{};
  std::string text{};
};

// Throw Error for a message that no process of this version sends.
[[noreturn]] void Refuse();

Bytes Encode(const Message& message);

// Return the message that rank `from` of `size` has sent to `rank`. A part's ranks are never empty.
// Throws Error unless Encode can have made the bytes, and a part comes from a child.
Message Decode(const Bytes& bytes, int from, int rank, int size);

// Throw Error for a part that came before or after the reduction, and for a result that is not the
// parent's answer. A null exchange means that nobody waits for the result.
void CheckPart(const Exchange& exchange, int from);
void CheckResult(const Exchange* exchange, int from, const Message& result);

}  // namespace syncbn
