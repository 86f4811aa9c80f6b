// The bytes of a message are a mark, and then its fields. A text or an array follows its length.
#include "exchange/message.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <tuple>
#include <type_traits>

#include "core/error.h"

namespace syncbn {
namespace {

constexpr uint64_t kMark = 0x53424e3a;  // change it with the format

[[noreturn]] void Refuse() {
  throw Error(
      "all processes must run one version of gluon_syncbn, got a message that this version never "
      "sends. Install the same version for all processes.");
}

// Returns references to all fields of a message, in the order of their bytes.
template <typename AnyMessage>
auto FieldsOf(AnyMessage& message) {
  using Plain = std::remove_const_t<AnyMessage>;
  if constexpr (std::is_same_v<Plain, PartMessage>) {
    auto& [key, signature, numbers] = message;
    return std::tie(key.layer, key.phase, key.call, signature.operation, signature.dtype,
                    signature.channels, signature.axis, signature.epsilon, signature.ranks,
                    numbers);
  } else if constexpr (std::is_same_v<Plain, ResultMessage>) {
    return std::tie(message.key.layer, message.key.phase, message.key.call, message.numbers);
  } else if constexpr (std::is_same_v<Plain, FailMessage>) {
    return std::tie(message.text);
  } else {
    return std::tie();
  }
}

template <typename Field>
constexpr bool kIsNumber = std::is_arithmetic_v<Field> || std::is_enum_v<Field>;

template <typename T>
void Append(const T* numbers, size_t size, Bytes* to) {
  const size_t before = to->size();
  to->resize(before + size * sizeof(T));
  if (size > 0) std::memcpy(to->data() + before, numbers, size * sizeof(T));
}

template <typename Field>
void Write(const Field& field, Bytes* to) {
  if constexpr (kIsNumber<Field>) {
    Append(&field, 1, to);
  } else {
    Write(uint64_t{field.size()}, to);
    Append(field.data(), field.size(), to);
  }
}

// Reads one field after the other, never past the end.
struct Reader {
  template <typename Field>
  void Read(Field* field) {
    if constexpr (kIsNumber<Field>) {
      Copy(1, field);
    } else {
      uint64_t size = 0;
      Read(&size);
      if (size > left / sizeof(typename Field::value_type)) Refuse();
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

}  // namespace

Bytes Encode(const Message& message) {
  Bytes bytes;
  Write(kMark, &bytes);
  Write(uint64_t{message.index()}, &bytes);
  const auto write_all = [&](const auto&... fields) { (Write(fields, &bytes), ...); };
  std::visit([&](const auto& kind) { std::apply(write_all, FieldsOf(kind)); }, message);
  return bytes;
}

Message Decode(const Bytes& bytes) {
  static const Message kinds[] = {PartMessage(), ResultMessage(), FailMessage(), LeaveMessage()};
  Reader reader{bytes.data(), bytes.size()};
  uint64_t mark = 0, kind = 0;
  reader.Read(&mark);
  reader.Read(&kind);
  if (mark != kMark || kind >= std::size(kinds)) Refuse();
  Message message = kinds[kind];
  const auto read_all = [&](auto&... fields) { (reader.Read(&fields), ...); };
  std::visit([&](auto& fields) { std::apply(read_all, FieldsOf(fields)); }, message);
  if (reader.left > 0) Refuse();
  return message;
}

void CheckPart(const Exchange& exchange, int from) {
  const std::vector<Subtree>& children = exchange.position.children;
  const bool is_child = std::any_of(children.begin(), children.end(),
                                    [&](const Subtree& child) { return child.rank == from; });
  if (!is_child || exchange.sent || exchange.parts.count({from})) Refuse();
}

void CheckResult(const Exchange* exchange, int from, const Numbers& result) {
  if (exchange == nullptr || !exchange->sent || exchange->position.parent != from) Refuse();
  const bool grows = exchange->signature.operation == Operation::kConcat;
  if (!grows && result.size() != *exchange->sent) Refuse();
}

}  // namespace syncbn
