// Tests any bytes as messages: they are an Error, or a message that is encoded as the same bytes;
// and a rank in any state survives all that others send.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "collective/processes/protocol.h"
#include "collective/common/reduce_operation.h"
#include "core/error.h"
#include "fuzz.h"

namespace {

using syncbn::Bytes;
using syncbn::Contribution;
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

bool OneIn(std::mt19937* random, int n) { return (*random)() % n == 0; }

// Mostly the 24 bytes of one channel's moments, else any number of bytes up to 40.
Bytes Payload(std::mt19937* random) {
  if (OneIn(random, 4)) return fuzz::Random<Bytes>(random, 40);
  return Bytes(24, 0);
}

Message AMessage(std::mt19937* random) {
  Message message;
  message.kind = static_cast<MessageKind>(OneIn(random, 2) ? 0 : (*random)() % 6);
  message.generation.recoveries = static_cast<int>((*random)() % 3 / 2);
  message.generation.joins = static_cast<int>((*random)() % 3 / 2);
  message.step = static_cast<int>((*random)() % 6) - 1;
  message.empty = OneIn(random, 5);
  message.number = (*random)() % 4;
  message.key = fuzz::Choose(random, kKeys);
  message.title = "layer '" + message.key + "'";
  message.signature = OneIn(random, 20) ? "" : "channels=1";
  message.operation = fuzz::Choose(random, kOperations);
  const std::vector<int>& ranks = fuzz::Choose(random, kRanks);
  message.ranks.assign(ranks.begin(), ranks.end());
  if (OneIn(random, 20)) message.text = "waits";
  message.payload = Payload(random);
  return message;
}

void TestDecode() {
  std::mt19937 random(1);
  int whole = 0;
  for (int i = check::Times(fuzz::kFull, fuzz::kBrief); i > 0; --i) {
    Bytes bytes = OneIn(&random, 8) ? fuzz::Random<Bytes>(&random, 200) : Encode(AMessage(&random));
    if (!OneIn(&random, 4)) fuzz::Mutate(&random, &bytes);
    try {
      const Message message = syncbn::Decode(bytes);
      CHECK(Encode(message) == bytes);
      ++whole;
    } catch (const syncbn::Error&) {
    }
  }
  CHECK(whole > 0);
}

void TestReduceOperations() {
  std::mt19937 random(2);
  for (int i = check::Times(fuzz::kFull, fuzz::kBrief); i > 0; --i) {
    Bytes lower = Payload(&random);
    const Bytes higher = OneIn(&random, 2) ? fuzz::Random<Bytes>(&random, 40) : lower;
    const ReduceOperation operation = fuzz::Choose(&random, kOperations);
    const bool concat = operation == ReduceOperation::kConcat;
    const size_t expected = concat ? lower.size() + higher.size() : lower.size();
    try {
      Reduce(operation, higher, &lower);
      CHECK_EQ(lower.size(), expected);
      if (operation == ReduceOperation::kMoments) CHECK_EQ(lower.size() % 16, 8u);
    } catch (const syncbn::Error&) {
    }
  }
}

// One rank of four, which receives anything and does anything.
class Victim {
 public:
  explicit Victim(std::mt19937* random)
      : random_(random), protocol_(kOwn, kSize, [this](int to, Bytes bytes) { Send(to, bytes); }) {}

  void Live() {
    for (int i = 0; i < 60; ++i) {
      now_ += std::chrono::milliseconds((*random_)() % 100);
      Happen();
    }
  }

 private:
  void Send(int to, const Bytes& bytes) {
    CHECK(0 <= to && to < kSize && to != kOwn, to);
    syncbn::Decode(bytes);
    if (OneIn(random_, 100)) throw syncbn::Error("the connection is reset");
  }

  void Happen() {
    switch ((*random_)() % 20) {
      case 0: return Begin();
      case 1: return Ignoring([&] { protocol_.Join(0.5, now_); });
      case 2: return protocol_.Tick(now_);
      case 3: return OneIn(random_, 4) ? protocol_.Fail("the ship sinks") : protocol_.Reset();
      case 4: return OneIn(random_, 50) ? protocol_.Leave() : protocol_.Reset();
      default: break;
    }
    Bytes bytes = Encode(AMessage(random_));
    if (OneIn(random_, 3)) fuzz::Mutate(random_, &bytes);
    protocol_.Handle(static_cast<int>(kOwn + 1 + (*random_)() % (kSize - 1)) % kSize, bytes, now_);
    for (auto& pending : pending_) {
      if (pending->over()) Ignoring([&] { pending->Result(); });
    }
  }

  void Begin() {
    Contribution own;
    own.key = fuzz::Choose(random_, kKeys);
    own.title = "layer '" + own.key + "'";
    own.signature = "channels=1";
    own.operation = fuzz::Choose(random_, kOperations);
    own.ranks = fuzz::Choose(random_, kRanks);
    own.timeout_seconds = 0.5;
    own.payload = Payload(random_);
    Ignoring([&] { pending_.push_back(protocol_.Begin(std::move(own), now_)); });
  }

  template <typename Body>
  void Ignoring(const Body& body) {
    try {
      body();
    } catch (const syncbn::Error&) {
    }
  }

  std::mt19937* const random_;
  syncbn::Time now_{};
  Protocol protocol_;
  std::vector<std::shared_ptr<syncbn::PendingExchange>> pending_;
};

void TestProtocol() {
  std::mt19937 random(3);
  for (int i = check::Times(fuzz::kFull, fuzz::kBrief) / 60; i > 0; --i) Victim(&random).Live();
}

}  // namespace

int main() {
  TestDecode();
  TestReduceOperations();
  TestProtocol();
  return check::Result();
}
