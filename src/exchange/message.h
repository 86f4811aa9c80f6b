// The messages between processes, their bytes, and all checks of received messages. All processes
// run one build on one kind of machine, so numbers are sent as they are in memory. The first eight
// bytes identify the format.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/transport.h"

namespace syncbn {

enum class MessageKind : int32_t {
  kPart,    // the parent gets key, signature, ranks, and the numbers of the sender's subtree
  kResult,  // a child rank gets key and the reduced numbers
  kFail,    // all ranks get the text of the sender's failure
  kLeave,   // all ranks get it last, because the sender's program ends
};

struct Message {
  MessageKind kind = MessageKind::kPart;
  Key key{};
  Signature signature{};
  std::vector<int> ranks{};  // empty for all
  Numbers numbers{};
  std::string text{};
};

Bytes Encode(const Message& message);

// Returns the message that rank `from` of `size` has sent to `rank`. A part without ranks gets all
// ranks. Throws Error if Encode cannot have made the bytes, or if a part is not from a child.
Message Decode(const Bytes& bytes, int from, int rank, int size);

// Throws Error for a second part of `from` and for a part after the reduction.
void CheckPart(const Exchange& exchange, int from);
// Throws Error for a result that is not the parent's answer. No exchange is pending if it is null.
void CheckResult(const Exchange* exchange, int from, const Message& result);

}  // namespace syncbn
