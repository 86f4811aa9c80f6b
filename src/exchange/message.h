// The messages between processes, their bytes, and all checks of received messages. All processes
// run one build on one kind of machine, so numbers are sent as they are in memory. The first eight
// bytes identify the format. exchange.h describes the tree of ranks.
#pragma once
#include <string>
#include <variant>

#include "exchange/exchange.h"
#include "exchange/transport.h"

namespace syncbn {

// The numbers of the sender's subtree, sent to its parent.
struct PartMessage {
  Key key{};
  Signature signature{};
  Numbers numbers{};
};

// The reduced numbers, sent to a child rank.
struct ResultMessage {
  Key key{};
  Numbers numbers{};
};

// The sender's failure, sent to all ranks.
struct FailMessage {
  std::string text{};
};

// The sender's last message, sent to all ranks.
struct LeaveMessage {};

using Message = std::variant<PartMessage, ResultMessage, FailMessage, LeaveMessage>;

Bytes Encode(const Message& message);

// Throws Error if the bytes are no encoded message.
Message Decode(const Bytes& bytes);

// Throws Error if the exchange does not wait for a part of rank `from`. Other values of a part need
// no check, because they must equal the values of this rank's devices.
void CheckPart(const Exchange& exchange, int from);
// Throws Error if `exchange` is null (none is pending), if it does not wait for a result of rank
// `from`, or if the result does not fit the numbers that this rank has sent.
void CheckResult(const Exchange* exchange, int from, const Numbers& result);

}  // namespace syncbn
