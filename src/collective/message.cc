// Messages to bytes and back: a fixed head with the lengths, then the variable parts.
#include "collective/message.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>

#include "core/error.h"

namespace syncbn {
namespace {

constexpr uint32_t kMark = 0x53424e33;  // to be changed with the format

struct Head {
  uint32_t mark;
  MessageKind kind;
  Generation generation;
  int32_t step, empty;
  int64_t number;
  uint32_t key, title, signature, operation, text, ranks;  // lengths
  uint64_t payload;
};
static_assert(std::has_unique_object_representations<Head>::value, "a head has no padding");

template <typename Container>
char* Put(const Container& from, char* to) {
  const size_t bytes = from.size() * sizeof(from[0]);
  if (bytes > 0) std::memcpy(to, from.data(), bytes);
  return to + bytes;
}

[[noreturn]] void Refuse() {
  throw Error("another process runs another version of gluon_syncbn; install the same everywhere");
}

// The variable parts of a message, taken one after the other; none reaches behind the end.
struct Reader {
  template <typename Container>
  void Take(uint64_t size, Container* to) {
    constexpr size_t kElement = sizeof((*to)[0]);
    if (size > left / kElement) Refuse();
    to->resize(size);
    if (size > 0) std::memcpy(&(*to)[0], from, size * kElement);
    from += size * kElement;
    left -= size * kElement;
  }

  const char* from;
  size_t left;
};

// Whether it may be a number of recoveries or joins.
bool IsCount(int32_t number) {
  return 0 <= number && number < std::numeric_limits<int32_t>::max() / 2;
}

bool Ascend(const std::vector<int32_t>& ranks) {
  return (ranks.empty() || ranks.front() >= 0) &&
         std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<int32_t>()) ==
             ranks.end();
}

}  // namespace

Bytes Encode(const Message& message) {
  Head head{};
  head.mark = kMark;
  head.kind = message.kind;
  head.generation = message.generation;
  head.step = message.step;
  head.empty = message.empty;
  head.number = message.number;
  head.key = static_cast<uint32_t>(message.key.size());
  head.title = static_cast<uint32_t>(message.title.size());
  head.signature = static_cast<uint32_t>(message.signature.size());
  head.operation = static_cast<uint32_t>(message.operation.size());
  head.text = static_cast<uint32_t>(message.text.size());
  head.ranks = static_cast<uint32_t>(message.ranks.size());
  head.payload = message.payload.size();
  Bytes bytes(sizeof(head) + message.key.size() + message.title.size() + message.signature.size() +
              message.operation.size() + message.text.size() +
              message.ranks.size() * sizeof(message.ranks[0]) + message.payload.size());
  std::memcpy(bytes.data(), &head, sizeof(head));
  char* to = bytes.data() + sizeof(head);
  to = Put(message.key, to);
  to = Put(message.title, to);
  to = Put(message.signature, to);
  to = Put(message.operation, to);
  to = Put(message.text, to);
  to = Put(message.ranks, to);
  Put(message.payload, to);
  return bytes;
}

Message Decode(const Bytes& bytes) {
  Head head{};
  if (bytes.size() < sizeof(head)) Refuse();
  std::memcpy(&head, bytes.data(), sizeof(head));
  const auto kind = static_cast<uint32_t>(head.kind);
  if (head.mark != kMark || kind > static_cast<uint32_t>(MessageKind::kStatus) ||
      !IsCount(head.generation.recoveries) || !IsCount(head.generation.joins) ||
      head.step < kInvitation || head.empty < 0 || head.empty > 1) {
    Refuse();
  }
  Message message;
  message.kind = head.kind;
  message.generation = head.generation;
  message.step = head.step;
  message.empty = head.empty != 0;
  message.number = head.number;
  Reader reader{bytes.data() + sizeof(head), bytes.size() - sizeof(head)};
  reader.Take(head.key, &message.key);
  reader.Take(head.title, &message.title);
  reader.Take(head.signature, &message.signature);
  reader.Take(head.operation, &message.operation);
  reader.Take(head.text, &message.text);
  reader.Take(head.ranks, &message.ranks);
  reader.Take(head.payload, &message.payload);
  if (reader.left > 0 || !Ascend(message.ranks)) Refuse();
  return message;
}

}  // namespace syncbn
