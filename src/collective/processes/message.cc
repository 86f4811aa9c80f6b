// Messages to bytes and back: a mark, then one field after the other, texts and arrays after their
// lengths.
#include "collective/processes/message.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <type_traits>

#include "core/error.h"

namespace syncbn {
namespace {

constexpr uint64_t kMark = 0x53424e37;  // to be changed with the format
constexpr int64_t kMaxNumber = 2'000'000'000'000;  // milliseconds, twice kNeverSeconds

// Calls `visit` for each field of a message, in the order of their bytes.
template <typename AnyMessage, typename Visit>
void ForEachField(AnyMessage* message, const Visit& visit) {
  visit(message->kind);
  visit(message->number);
  visit(message->operation);
  visit(message->key);
  visit(message->title);
  visit(message->signature);
  visit(message->ranks);
  visit(message->text);
  visit(message->payload);
}

template <typename Field>
constexpr bool kIsNumber = std::has_unique_object_representations<Field>::value;

template <typename Field>
void Write(const Field& field, Bytes* to) {
  if constexpr (kIsNumber<Field>) {
    AppendBytes(&field, 1, to);
  } else {
    Write(uint64_t{field.size()}, to);
    AppendBytes(field.data(), field.size(), to);
  }
}

// Takes fields one after the other; none reaches past the end.
struct Reader {
  template <typename Field>
  void Read(Field* field) {
    if constexpr (kIsNumber<Field>) {
      Copy(1, field);
    } else {
      uint64_t size = 0;
      Read(&size);
      if (size > left) Refuse();
      field->resize(size);
      Copy(size, field->data());
    }
  }

  template <typename T>
  void Copy(uint64_t size, T* to) {
    if (size > left / sizeof(T)) Refuse();
    if (size > 0) std::memcpy(to, from, size * sizeof(T));
    from += size * sizeof(T);
    left -= size * sizeof(T);
  }

  const char* from;
  size_t left;
};

bool Ascend(const std::vector<int>& ranks) {
  return (ranks.empty() || ranks.front() >= 0) &&
         std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<int>()) == ranks.end();
}

bool IsValid(const Message& message) {
  return message.kind >= MessageKind::kPart && message.kind <= MessageKind::kLeave &&
         IsReduceOperation(static_cast<int32_t>(message.operation)) &&
         Ascend(message.ranks) && 0 <= message.number && message.number <= kMaxNumber;
}

}  // namespace

void Refuse() {
  throw Error("another process runs another version of gluon_syncbn; install the same everywhere");
}

Bytes Encode(const Message& message) {
  Bytes bytes;
  bytes.reserve(256 + message.payload.size());
  Write(kMark, &bytes);
  ForEachField(&message, [&](const auto& field) { Write(field, &bytes); });
  return bytes;
}

Message Decode(const Bytes& bytes) {
  Reader reader{bytes.data(), bytes.size()};
  uint64_t mark = 0;
  reader.Read(&mark);
  if (mark != kMark) Refuse();
  Message message;
  ForEachField(&message, [&](auto& field) { reader.Read(&field); });
  if (reader.left > 0 || !IsValid(message)) Refuse();
  return message;
}

}  // namespace syncbn
