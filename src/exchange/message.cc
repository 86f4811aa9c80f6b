// The bytes of a message are a mark, and then its fields. A text or an array follows its length.
#include "exchange/message.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <type_traits>

#include "core/error.h"

namespace syncbn {
namespace {

constexpr uint64_t kMark = 0x53424e38;            // change it with the format
constexpr int64_t kMostCalls = int64_t{1} << 53;  // also limits repeats

[[noreturn]] void Refuse() {
  throw Error(
      "all processes must run one version of gluon_syncbn, got a message that this version never "
      "sends. Install the same version for all processes.");
}

// Calls `visit` for each field of a message, in the order of their bytes.
template <typename AnyMessage, typename Visit>
void ForEachField(AnyMessage* message, const Visit& visit) {
  visit(message->kind);
  visit(message->key.layer);
  visit(message->key.phase);
  visit(message->key.call);
  visit(message->key.repeat);
  visit(message->signature.operation);
  visit(message->signature.dtype);
  visit(message->signature.channels);
  visit(message->signature.axis);
  visit(message->signature.epsilon);
  visit(message->signature.text);
  visit(message->ranks);
  visit(message->text);
  visit(message->numbers);
}

template <typename Field>
constexpr bool kIsNumber = std::is_arithmetic_v<Field> || std::is_enum_v<Field>;

template <typename T>
void Append(const T* numbers, size_t size, Bytes* to) {
  const char* const begin = reinterpret_cast<const char*>(numbers);
  to->insert(to->end(), begin, begin + size * sizeof(T));
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

template <typename Enum>
bool IsUpTo(Enum last, Enum value) {
  return Enum{} <= value && value <= last;
}

bool IsCount(int64_t number) { return 0 <= number && number <= kMostCalls; }

// Returns true if the ranks ascend, are below `size` and contain the rank of this process.
bool AreRanks(const std::vector<int>& ranks, int rank, int size) {
  const auto not_ascending = std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>());
  return !ranks.empty() && ranks.front() >= 0 && ranks.back() < size &&
         not_ascending == ranks.end() && std::binary_search(ranks.begin(), ranks.end(), rank);
}

bool IsChild(int from, int rank, const std::vector<int>& ranks) {
  const std::vector<Subtree> children = PositionOf(rank, ranks).children;
  return std::any_of(children.begin(), children.end(),
                     [&](const Subtree& child) { return child.rank == from; });
}

}  // namespace

Bytes Encode(const Message& message) {
  Bytes bytes;
  bytes.reserve(256 + message.numbers.size() * sizeof(double));
  Write(kMark, &bytes);
  ForEachField(&message, [&](const auto& field) { Write(field, &bytes); });
  return bytes;
}

Message Decode(const Bytes& bytes, int from, int rank, int size) {
  Reader reader{bytes.data(), bytes.size()};
  uint64_t mark = 0;
  reader.Read(&mark);
  if (mark != kMark) Refuse();
  Message message;
  ForEachField(&message, [&](auto& field) { reader.Read(&field); });
  const Signature& signature = message.signature;
  std::vector<int>& ranks = message.ranks;
  const bool is_part = message.kind == MessageKind::kPart;
  const bool is_valid =
      reader.left == 0 && from != rank && 0 <= from && from < size &&
      IsUpTo(MessageKind::kLeave, message.kind) && IsUpTo(Phase::kCall, message.key.phase) &&
      IsCount(message.key.call) && IsCount(message.key.repeat) &&
      IsUpTo(Operation::kMoments, signature.operation) &&
      IsSupported(static_cast<int>(signature.dtype)) && (is_part || ranks.empty());
  if (!is_valid) Refuse();
  if (is_part && ranks.empty()) {
    ranks.resize(static_cast<size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  if (is_part && !(AreRanks(ranks, rank, size) && IsChild(from, rank, ranks))) Refuse();
  return message;
}

void CheckPart(const Exchange& exchange, int from) {
  if (exchange.sent || exchange.parts.count({from})) Refuse();
}

void CheckResult(const Exchange* exchange, int from, const Message& result) {
  const bool is_awaited = exchange != nullptr && exchange->sent &&
                          exchange->position.parent == from &&
                          *exchange->sent == result.numbers.size();
  if (!is_awaited) Refuse();
}

}  // namespace syncbn
