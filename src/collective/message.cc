// Messages to bytes and back: a fixed head with the lengths, then the variable parts.
#include "collective/message.h"

#include <cstring>
#include <type_traits>

#include "core/error.h"

namespace syncbn {
namespace {

constexpr uint32_t kMark = 0x53424e31;  // to be changed with the format

struct Head {
  uint32_t mark;
  MessageKind kind;
  Era era;
  int32_t step, empty;
  int64_t number;
  uint32_t key, title, contract, merger, ranks;  // lengths
  uint64_t payload;
};
static_assert(std::is_trivially_copyable<Head>::value, "a head is copied byte by byte");

template <typename Container>
char* Put(const Container& from, char* to) {
  const size_t bytes = from.size() * sizeof(from[0]);
  if (bytes > 0) std::memcpy(to, from.data(), bytes);
  return to + bytes;
}

template <typename Container>
const char* Take(const char* from, size_t size, Container* to) {
  to->resize(size);
  const size_t bytes = size * sizeof((*to)[0]);
  if (bytes > 0) std::memcpy(&(*to)[0], from, bytes);
  return from + bytes;
}

size_t Length(const Head& head) {
  return sizeof(Head) + head.key + head.title + head.contract + head.merger +
         head.ranks * sizeof(int32_t) + head.payload;
}

}  // namespace

Bytes Encode(const Message& message) {
  Head head{};
  head.mark = kMark;
  head.kind = message.kind;
  head.era = message.era;
  head.step = message.step;
  head.empty = message.empty;
  head.number = message.number;
  head.key = static_cast<uint32_t>(message.key.size());
  head.title = static_cast<uint32_t>(message.title.size());
  head.contract = static_cast<uint32_t>(message.contract.size());
  head.merger = static_cast<uint32_t>(message.merger.size());
  head.ranks = static_cast<uint32_t>(message.ranks.size());
  head.payload = message.payload.size();
  Bytes bytes(Length(head));
  std::memcpy(bytes.data(), &head, sizeof(head));
  char* to = bytes.data() + sizeof(head);
  to = Put(message.key, to);
  to = Put(message.title, to);
  to = Put(message.contract, to);
  to = Put(message.merger, to);
  to = Put(message.ranks, to);
  Put(message.payload, to);
  return bytes;
}

Message Decode(const Bytes& bytes) {
  Head head{};
  if (bytes.size() >= sizeof(head)) std::memcpy(&head, bytes.data(), sizeof(head));
  if (head.mark != kMark || Length(head) != bytes.size()) {
    throw Error("another process runs another version of gluon_syncbn; install the same everywhere");
  }
  Message message;
  message.kind = head.kind;
  message.era = head.era;
  message.step = head.step;
  message.empty = head.empty != 0;
  message.number = head.number;
  const char* from = bytes.data() + sizeof(head);
  from = Take(from, head.key, &message.key);
  from = Take(from, head.title, &message.title);
  from = Take(from, head.contract, &message.contract);
  from = Take(from, head.merger, &message.merger);
  from = Take(from, head.ranks, &message.ranks);
  Take(from, head.payload, &message.payload);
  return message;
}

}  // namespace syncbn
