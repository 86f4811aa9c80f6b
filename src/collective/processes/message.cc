// Messages to bytes and back: a fixed head with the lengths, then the variable parts.
#include "collective/processes/message.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>

#include "core/error.h"

namespace syncbn {
namespace {

constexpr uint64_t kMark = 0x53424e34;  // to be changed with the format

struct Head {
  uint64_t mark = kMark;
  MessageHead numbers;
  uint64_t lengths[6] = {};  // of the fields
};
static_assert(std::has_unique_object_representations<Head>::value, "a head has no padding");

// Calls `function` for each variable part of a message, in their order.
template <typename AnyMessage, typename Function>
void ForEachField(AnyMessage* message, const Function& function) {
  function(message->key);
  function(message->title);
  function(message->signature);
  function(message->text);
  function(message->ranks);
  function(message->payload);
}

template <typename Container>
char* Put(const Container& from, char* to) {
  const size_t bytes = from.size() * sizeof(from[0]);
  if (bytes > 0) std::memcpy(to, from.data(), bytes);
  return to + bytes;
}

[[noreturn]] void Refuse() {
  throw Error("another process runs another version of gluon_syncbn; install the same everywhere");
}

// The variable parts of a message, taken one after the other; none reaches past the end.
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

// True for a possible number of recoveries or joins.
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
  Head head;
  head.numbers = message;
  uint64_t* length = head.lengths;
  size_t total = sizeof(head);
  ForEachField(&message, [&](const auto& field) {
    *length++ = field.size();
    total += field.size() * sizeof(field[0]);
  });
  Bytes bytes(total);
  std::memcpy(bytes.data(), &head, sizeof(head));
  char* to = bytes.data() + sizeof(head);
  ForEachField(&message, [&](const auto& field) { to = Put(field, to); });
  return bytes;
}

Message Decode(const Bytes& bytes) {
  Head head;
  if (bytes.size() < sizeof(head)) Refuse();
  std::memcpy(&head, bytes.data(), sizeof(head));
  const MessageHead& of = head.numbers;
  if (head.mark != kMark || of.kind < MessageKind::kPart || of.kind > MessageKind::kStatus ||
      !IsCount(of.generation.recoveries) || !IsCount(of.generation.joins) ||
      of.step < kInvitation || of.empty < 0 || of.empty > 1 ||
      !IsReduceOperation(static_cast<int32_t>(of.operation))) {
    Refuse();
  }
  Message message;
  static_cast<MessageHead&>(message) = of;
  Reader reader{bytes.data() + sizeof(head), bytes.size() - sizeof(head)};
  const uint64_t* length = head.lengths;
  ForEachField(&message, [&](auto& field) { reader.Take(*length++, &field); });
  if (reader.left > 0 || !Ascend(message.ranks)) Refuse();
  return message;
}

}  // namespace syncbn
