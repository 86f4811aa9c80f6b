// Tests any bytes as messages, as a broken network or another version may send them: they are an
// Error, or a message that is encoded as the same bytes; and a rank in any state survives them all.
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "simulation.h"

namespace {

using syncbn::Bytes;
using syncbn::Message;
using syncbn::MessageKind;
using syncbn::Protocol;
using syncbn::ReduceOperation;

constexpr int kSize = 4, kOwn = 1;
const char* const kKeys[] = {"a", "b"};
const ReduceOperation kOperations[] = {
    ReduceOperation::kSumFloat64, ReduceOperation::kSumFloat32, ReduceOperation::kSumInt64,
    ReduceOperation::kMoments,    ReduceOperation::kConcat,     ReduceOperation{9}};
const std::vector<int> kRanks[] = {{}, {0, 1}, {1, 2, 3}, {0, 2}, {1, 9}, {0, 1, 2, 3}};

std::mt19937 random_bits(1);

// From 0 to n - 1.
int Below(size_t n) { return static_cast<int>(random_bits() % n); }
bool OneIn(int n) { return Below(n) == 0; }
template <typename T, size_t n>
const T& Choose(const T (&from)[n]) {
  return from[Below(n)];
}

Bytes RandomBytes(int longest) {
  Bytes bytes(Below(longest + 1));
  for (char& byte : bytes) byte = static_cast<char>(random_bits());
  return bytes;
}

// One to three changes: bits, bytes, numbers at the edges of their range, the length, the order.
Bytes Changed(Bytes bytes) {
  constexpr uint64_t kNumbers[] = {0, 1, 7, 0x7fffffff, 0x80000000, 0xffffffff, ~0ull, ~0ull / 2};
  for (int changes = 1 + Below(3); changes > 0; --changes) {
    const int kind = bytes.empty() ? 0 : Below(6), at = bytes.empty() ? 0 : Below(bytes.size());
    if (kind == 0) bytes.insert(bytes.end(), 1 + Below(16), static_cast<char>(random_bits()));
    if (kind == 1) bytes[at] = static_cast<char>(bytes[at] ^ (1 << Below(8)));
    if (kind == 2) bytes[at] = static_cast<char>(random_bits());
    if (kind == 3) bytes.resize(at);
    if (kind == 4) std::rotate(bytes.begin(), bytes.begin() + at, bytes.end());
    if (kind == 5) {
      const uint64_t number = Choose(kNumbers);
      const size_t place = at / 4 * 4;  // where a head has its numbers
      std::memcpy(&bytes[place], &number, std::min<size_t>(bytes.size() - place, 4 + 4 * Below(2)));
    }
  }
  return bytes;
}

// Mostly the 24 bytes of one channel's moments, else any number of bytes up to 40.
Bytes Payload() { return OneIn(4) ? RandomBytes(40) : Bytes(24, 0); }

Message AMessage() {
  Message message;
  message.kind = static_cast<MessageKind>(OneIn(2) ? 0 : Below(6));
  message.generation.recoveries = Below(3) / 2;
  message.generation.joins = Below(3) / 2;
  message.step = Below(6) - 1;
  message.empty = OneIn(5);
  message.number = Below(4);
  message.key = message.title = Choose(kKeys);
  message.signature = OneIn(20) ? "" : "channels=1";
  message.operation = Choose(kOperations);
  const std::vector<int>& ranks = Choose(kRanks);
  message.ranks.assign(ranks.begin(), ranks.end());
  if (OneIn(20)) message.text = "waits";
  message.payload = Payload();
  return message;
}

// One rank of four, which receives anything and does anything.
class Victim {
 public:
  void Live() {
    for (int i = 0; i < 60; ++i) {
      now_ += std::chrono::milliseconds(Below(100));
      Happen();
    }
  }

 private:
  static void Send(int to, const Bytes& bytes) {
    CHECK(0 <= to && to < kSize && to != kOwn, to);
    syncbn::Decode(bytes);
    if (OneIn(100)) throw syncbn::Error("the connection is reset");
  }

  void Happen() {
    switch (Below(20)) {
      case 0: return Begin();
      case 1: ErrorOf([&] { protocol_.Join(0.5, now_); }); return;
      case 2: return protocol_.Tick(now_);
      case 3: return OneIn(4) ? protocol_.Fail("the ship sinks") : protocol_.Reset();
      case 4: return OneIn(50) ? protocol_.Leave() : protocol_.Reset();
      default: break;
    }
    Bytes bytes = OneIn(20) ? RandomBytes(200) : Encode(AMessage());
    if (OneIn(2)) bytes = Changed(std::move(bytes));
    ErrorOf([&] { CHECK(Encode(syncbn::Decode(bytes)) == bytes); });
    protocol_.Handle((kOwn + 1 + Below(kSize - 1)) % kSize, bytes, now_);
    for (auto& pending : pending_) {
      if (pending->over()) ErrorOf([&] { pending->Result(); });
    }
  }

  void Begin() {
    syncbn::Contribution own = simulation::Of(Choose(kKeys), Payload(), Choose(kOperations));
    own.ranks = Choose(kRanks);
    ErrorOf([&] { pending_.push_back(protocol_.Begin(std::move(own), now_)); });
  }

  syncbn::Time now_{};
  Protocol protocol_{kOwn, kSize, Send};
  std::vector<std::shared_ptr<syncbn::PendingExchange>> pending_;
};

TEST(RankSurvivesAllMessages) {
  for (int i = check::Times(16000, check::Rounds(10000)); i > 0; --i) Victim().Live();
}

}  // namespace

int main() { return check::RunTests(); }
