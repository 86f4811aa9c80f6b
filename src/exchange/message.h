// The messages between processes, their bytes, and all checks of received messages. All processes
// run one build on one kind of machine, so numbers are sent as they are in memory. The first eight
// bytes identify the format. exchange.h describes the tree of ranks.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/transport.h"

namespace syncbn {

enum class MessageKind : int32_t {
  kPart,    // key, signature, ranks, and the numbers of the sender's subtree; sent to its parent
  kResult,  // key and the reduced numbers, sent to a child rank
  kFail,    // the text of the sender's failure, sent to all ranks
  kLeave,   // the sender's last message, sent to all ranks
};

struct Message {
  MessageKind kind = MessageKind::kPart;
  Key key{};
  Signature signature{};
  std::vector<int> ranks{};  // the ranks that synchronize; empty for all ranks
  Numbers numbers{};
  std::string text{};
};

Bytes Encode(const Message& message);

// Decodes a message from rank `from` to rank `rank`. There are `size` ranks. If the `ranks` of a
// kPart are empty, they become all ranks. Throws Error if Encode cannot have made the bytes, or if
// a kPart is not from a child.
Message Decode(const Bytes& bytes, int from, int rank, int size);

// Throws Error if the exchange already has a part of rank `from` or has sent a part to the parent.
void CheckPart(const Exchange& exchange, int from);
// Throws Error if `exchange` is null (none is pending), if it does not wait for a result of rank
// `from`, or if the result has another length than the numbers that this rank has sent.
void CheckResult(const Exchange* exchange, int from, const Message& result);

}  // namespace syncbn
