// Tests the messages of exchange/table.h: single ranks receive wrong and random ones.
// GLUON_SYNCBN_NATIVE_TESTS=full sends more random messages.
#include <random>
#include <string>
#include <utility>

#include "check.h"
#include "ranks.h"

namespace {

using syncbn::Bytes;
using syncbn::Contribution;
using syncbn::Key;
using syncbn::Message;
using syncbn::Numbers;
using syncbn::Operation;
using syncbn::PartMessage;
using syncbn::Phase;
using syncbn::ResultMessage;
using syncbn::Ticket;
using syncbn::Time;
using syncbn::Waiting;

// ---- messages ----------------------------------------------------------------------------------

Rank RankOf(int rank, int size = 4) { return {std::make_shared<Network>(size), rank}; }

Waiting Begin(Rank* rank, const std::vector<int>& ranks) {
  Contribution own = ContributionOf(&rank->layers[0]);
  own.ranks = ranks;
  Ticket ticket;
  return rank->Arrive(std::move(own), &ticket, Time());
}

PartMessage PartOf(const std::vector<int>& ranks, int64_t call = 0) {
  PartMessage part;
  part.key.layer = "all";
  part.key.call = call;
  part.signature.channels = 1;
  part.ranks = ranks;
  part.numbers = {1};
  return part;
}

constexpr char kRefused[] = "Install the same version";

// Return true if a rank refuses a message. It first begins an exchange of the ranks `begun`.
bool Refuses(int rank, int from, const Bytes& bytes, const std::vector<int>* begun = nullptr) {
  Rank receiver = RankOf(rank);
  if (begun != nullptr) Begin(&receiver, *begun);
  return receiver.Handle(from, bytes).find(kRefused) != std::string::npos;
}

TEST(PartsThatAreRefused) {
  const auto refuses = [](int rank, int from, const PartMessage& part) {
    return Refuses(rank, from, Encode(part));
  };
  CHECK(refuses(0, 2, PartOf({1, 2})), "the receiver is missing");
  CHECK(refuses(3, 1, PartOf({1, 2})), "the receiver is missing");
  CHECK(refuses(0, 1, PartOf({0, 1, 100})), "a rank does not exist");
  CHECK(refuses(1, 2, PartOf({-1, 1, 2})), "a rank does not exist");
  CHECK(refuses(0, 1, PartOf({0, 1, 1})), "the ranks do not ascend");
  CHECK(refuses(0, 3, PartOf({0, 1})), "the sender is missing");
  CHECK(refuses(1, 0, PartOf({})), "the sender is the parent");
  CHECK(refuses(0, 0, PartOf({})), "the sender is the receiver");
  CHECK(refuses(0, 1, PartOf({}, -1)), "-1 is not a number of a call");
  PartMessage wrong = PartOf({});
  wrong.signature.operation = static_cast<Operation>(-1);
  CHECK(refuses(0, 1, wrong), "-1 is not an operation");
  wrong = PartOf({});
  wrong.signature.dtype = static_cast<syncbn::DType>(99);
  CHECK(refuses(0, 1, wrong), "99 is not a dtype");
  Bytes bytes = Encode(PartOf({}));
  bytes[sizeof(uint64_t)] = 9;
  CHECK(Refuses(0, 1, bytes), "9 is not a kind of message");
  bytes = Encode(PartOf({}));
  for (const size_t size : {bytes.size() + 9, bytes.size() - 1, size_t{9}, size_t{0}}) {
    bytes.resize(size);
    CHECK(Refuses(0, 1, bytes), size, " bytes");
  }
  Rank twice = RankOf(0);
  CHECK_EQ(twice.Handle(1, Encode(PartOf({}))), "");
  CheckHas(twice.Handle(1, Encode(PartOf({}))), kRefused);
}

TEST(ResultsThatAreRefused) {
  const std::vector<int> all, pair{1, 2};
  const auto result = [](size_t size) {
    ResultMessage message{{}, Numbers(size)};
    message.key.layer = "all";
    return Encode(message);
  };
  CHECK(!Refuses(1, 0, result(1), &all));
  CHECK(Refuses(1, 0, result(1)), "no exchange has begun");
  CHECK(Refuses(1, 0, result(2), &all), "another size than the part had");
  CHECK(Refuses(1, 2, result(1), &all), "the sender is not the parent");
  CHECK(Refuses(1, 0, result(1), &pair), "the receiver has no parent and has sent nothing");
}

// The receiver tells all ranks, also of a message that no version sends.
TEST(ProtocolErrorsAreToldToAllRanks) {
  Rank receiver = RankOf(0);
  receiver.Handle(1, Bytes(9));
  for (int rank = 1; rank < 4; ++rank) CHECK_EQ(receiver.network->queues[rank].size(), 1u);
  Rank other = RankOf(0);
  const Waiting waiting = Begin(&other, {});
  CheckHas(other.Handle(2, Encode(syncbn::FailMessage{"the ship sinks"})), "on rank 2: the ship");
  CHECK(waiting.exchange->over);
  CHECK(other.network->queues[1].empty());  // rank 2 has told it
}

// The error has the values of the two places that differ.
TEST(SignaturesThatDiffer) {
  Rank receiver = RankOf(1);
  Contribution own = ContributionOf(&receiver.layers[0]);
  own.signature.epsilon = 0.5;
  Ticket ticket;
  receiver.Arrive(std::move(own), &ticket, Time());
  PartMessage part = PartOf({});
  part.ranks = {0, 1};
  Rank root = RankOf(0);
  root.Handle(1, Encode(part));
  own = ContributionOf(&root.layers[0]);
  own.signature.epsilon = 0.5;
  own.ranks = {0, 1};
  const std::string text = ErrorOf([&] { root.Arrive(std::move(own), &ticket, Time()); });
  CheckHas(text, "rank 1 has channels=1, dtype=float32, axis=0, epsilon=0 and synchronizes");
  CheckHas(text, "but rank 0 has channels=1, dtype=float32, axis=0, epsilon=0.5");
  // The part of rank 1 has its epsilon.
  Rank parent = RankOf(0);
  const std::string error = parent.Handle(1, receiver.network->queues[0].front().second);
  CHECK_EQ(error, "");
  own = ContributionOf(&parent.layers[0]);
  CheckHas(ErrorOf([&] { parent.Arrive(std::move(own), &ticket, Time()); }), "epsilon=0.5");
}

// If a child rank has sent its part first, the error still names the devices that differ.
TEST(DevicesThatDifferAfterAPart) {
  Rank rank = RankOf(0);
  rank.Handle(1, Encode(PartOf({})));
  Ticket tickets[2];
  Contribution own = ContributionOf(&rank.layers[0], 0);
  own.devices = 2;
  rank.Arrive(std::move(own), &tickets[0], Time());
  own = ContributionOf(&rank.layers[0], 1);
  own.devices = 3;
  CheckHas(
      ErrorOf([&] { rank.Arrive(std::move(own), &tickets[1], Time()); }),
      "num_devices=2, but cpu(1) has channels=1, dtype=float32, axis=0, epsilon=0, num_devices=3");
}

TEST(CallsAfterTheRankHasLeft) {
  Rank rank = RankOf(0);
  rank.Leave();
  CheckHas(ErrorOf([&] { Begin(&rank, {}); }), "called after gluon_syncbn.distributed.shutdown()");
  CHECK_EQ(rank.InFlight(), 0u);
}

TEST(SendsThatFail) {
  struct Broken : LocalTransport {
    using LocalTransport::LocalTransport;
    void Send(int, Bytes) override { throw syncbn::Error("no cable"); }
  };
  struct BrokenRank : syncbn::Table {
    BrokenRank() { Connect(std::make_unique<Broken>(std::make_shared<Network>(2), 1)); }
    using Table::Arrive;
  } rank;
  syncbn::Members layer("all");
  Ticket ticket;
  CHECK_EQ(ErrorOf([&] { rank.Arrive(ContributionOf(&layer), &ticket, Time()); }),
           "sending to rank 0 failed: no cable");
}

TEST(GroupsThatDiffer) {
  Rank receiver = RankOf(0);
  Begin(&receiver, {0, 1});
  CHECK_EQ(receiver.Handle(1, Encode(PartOf({0, 1}))), "");
  CheckHas(receiver.Handle(2, Encode(PartOf({}))),
           "rank 2 synchronizes ranks 0, 1, 2, 3, but rank 0 has completed this call");
  Rank waiting = RankOf(0);
  Begin(&waiting, {0, 1, 2});
  CheckHas(waiting.Handle(1, Encode(PartOf({}))), "processes disagree: rank ");
}

TEST(TimeoutErrorsNameTheSubtree) {
  const auto error_without = [](int rank, int first, int last, int missing) {
    Rank receiver = RankOf(rank, 100);
    const Waiting waiting = Begin(&receiver, {});
    for (int from = first; from <= last; ++from) {
      if (from != missing) receiver.Handle(from, Encode(PartOf({})));
    }
    CHECK(receiver.IsOver(waiting, Time(std::chrono::hours(1))));
    return waiting.exchange->error;
  };
  const std::string inner = error_without(32, 33, 63, 62);
  CheckHas(inner, "1 of 100 processes. Arrived: ranks 32, 33, 34");
  CheckHas(inner, "61, 63. Missing: rank 62, which");
  CheckHas(error_without(0, 1, 31, -1), "68 of 100 processes. Arrived: ranks 0, 1, 2");
}

// A rank that receives random and mutated messages never sends to a rank that does not exist.
TEST(RandomMessages) {
  std::mt19937 random(7);
  const auto below = [&](size_t size) { return static_cast<int>(random() % size); };
  const int messages = check::Rounds(2'000'000, 100'000);
  for (int done = 0; done < messages;) {
    const int size = 2 + below(5) + (below(10) == 0 ? 60 : 0);
    Rank receiver = RankOf(below(size), size);
    Waiting waiting{};
    const auto ranks = [&] {
      std::vector<int> some;
      for (int rank = 0; rank < size; ++rank) {
        if (rank == receiver.number || below(3) > 0) some.push_back(rank);
      }
      return below(2) == 0 ? std::vector<int>() : some;
    };
    std::string failure;
    for (int step = 0; step < 30 && failure.empty(); ++step, ++done) {
      if (below(6) == 0) ErrorOf([&] { waiting = Begin(&receiver, ranks()); });
      if (below(40) == 0) receiver.Leave();
      if (below(8) == 0 && waiting.exchange) {
        receiver.IsOver(waiting, Time(std::chrono::milliseconds(below(5000))));
      }
      PartMessage part = PartOf(ranks(), below(3));
      if (below(8) == 0) part.ranks.push_back(below(2) == 0 ? 100 : 0);
      part.key.phase = static_cast<Phase>(below(12) == 0 ? below(5) : 0);
      part.signature.operation = static_cast<Operation>(below(9) / 3);
      part.numbers.resize(static_cast<size_t>(below(20) == 0 ? below(70000) : 1));
      Message message = part;
      if (below(2) == 0) message = ResultMessage{part.key, part.numbers};
      if (below(24) == 0) message = syncbn::FailMessage{"fail"};
      if (below(24) == 0) message = syncbn::LeaveMessage{};
      Bytes bytes = Encode(message);
      const auto& sent = receiver.network->queues[static_cast<size_t>(below(size))];
      if (!sent.empty() && below(6) == 0) bytes = sent.back().second;
      for (int mutation = below(4) == 0 ? 1 + below(3) : 0; mutation > 0; --mutation) {
        const auto at = bytes.begin() + (bytes.empty() ? 0 : below(bytes.size()));
        const int how = below(4);
        if (how == 0) bytes.erase(at, bytes.end());
        if (how == 1) bytes.insert(at, 9, '\x7f');
        if (how == 2 && at < bytes.end()) *at = static_cast<char>(random());
        if (how == 3 && bytes.end() - at >= 8) std::fill_n(at, 8, '\xff');
      }
      failure = receiver.Handle(below(size), bytes);
      CHECK(failure.find("sending") == std::string::npos, failure);
    }
  }
}

}  // namespace

int main() { return check::RunTests(); }
