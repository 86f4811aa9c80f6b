// The messages between processes, their bytes, and the checks of received bytes. All processes must
// run one build on one kind of machine, because bytes are copied from memory.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/transport.h"

namespace syncbn {

enum class MessageKind : int32_t {
  kPart,    // the root receives key, signature, ranks, and the numbers of a leaf
  kResult,  // a leaf receives key and the reduced numbers
  kFail,    // all ranks receive the text of the sender's failure
  kLeave,   // all ranks learn that the sender sends nothing more, because its program ends
};

struct Message {
  MessageKind kind = MessageKind::kPart;
  Key key{};
  Signature signature{};
  std::vector<int> ranks{};  // empty for all
  Numbers numbers{};
  std::string text{};
};

// Throws Error because of a message that no process of this version sends.
[[noreturn]] void Refuse();

Bytes Encode(const Message& message);

// Returns the message that rank `from` of `size` has sent to `rank`. Its ranks are never empty if
// it is a part. Throws Error if Encode cannot have made the bytes, or a part must not go to `rank`.
Message Decode(const Bytes& bytes, int from, int rank, int size);

}  // namespace syncbn
