// Tests exchange/table.h with several ranks in simulated time. Random programs run on up to 1,024
// ranks, and single ranks receive wrong and random messages.
// GLUON_SYNCBN_NATIVE_TESTS=full runs more programs and messages.
#include <array>
#include <cmath>
#include <map>
#include <numeric>
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

// ---- random programs ---------------------------------------------------------------------------

// A program ends well, or with an error that one rank, the culprit, causes in its last step.
enum class End { kWell, kStops, kFails, kLeaves, kDisagrees };
constexpr int kEnds = 5;

struct Pending {
  Waiting waiting;
  int exchange;  // its number in the program
};

struct Actor {
  int rank, id;
  int phases = 0;  // begun phases; a step has two
  bool over = false;
  std::array<Ticket, 3> tickets{};
  std::vector<Pending> pending{};
};

// All devices call the layer "all" twice in each step, and the devices of some ranks also call the
// layer "some". Backward comes in any order.
class Program {
 public:
  Program(int size, uint32_t seed, End end)
      : size_(size), end_(end), phases_(size > 100 ? 2 : 16), random_(seed) {
    const auto network = std::make_shared<Network>(size);
    network->random = &random_;
    culprit_ = Below(size);
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back(std::make_unique<Rank>(network, rank));
      devices_.push_back(1 + Below(size > 13 ? 1 : 3));
      if (Below(3) > 0) some_.push_back(rank);
      for (int id = 0; id < devices_.back(); ++id) actors_.push_back({rank, id});
    }
  }

  void Run() {
    constexpr int kMostRounds = 5000;
    int rounds = 0;
    std::vector<Actor*> actors;
    for (Actor& actor : actors_) actors.push_back(&actor);
    for (; rounds < kMostRounds && !AreOver(-1); ++rounds) {
      now_ += std::chrono::milliseconds(5);
      std::shuffle(actors.begin(), actors.end(), random_);
      for (Actor* actor : actors) Continue(actor);
    }
    CHECK(rounds < kMostRounds, size_, " ranks, end ", static_cast<int>(end_));
    for (int again = 0; again < 100; ++again) {
      for (const auto& rank : ranks_) rank->Failure();  // receives late messages
    }
    for (const auto& rank : ranks_) {
      CHECK(end_ != End::kWell || size_ > 100 || rank->AllHaveLeft());
      CHECK_EQ(rank->InFlight(), 0u, size_, " ranks, end ", static_cast<int>(end_));
    }
  }

 private:
  int Below(int size) { return static_cast<int>(random_() % static_cast<uint32_t>(size)); }

  // True if all actors of this rank are over, or all actors if the rank is -1.
  bool AreOver(int rank) const {
    return std::all_of(actors_.begin(), actors_.end(), [&](const Actor& actor) {
      return actor.over || (rank >= 0 && actor.rank != rank);
    });
  }

  // The order of these numbers changes their sum.
  static double NumberOf(int rank, int id, int exchange) {
    return std::pow(10, (7 * rank + 5 * id + exchange) % 17) * (1 + rank) / 3;
  }

  // All ranks get the same bits. Up to 32 ranks are summed in the order of devices and ranks.
  void CheckResult(const Actor& actor, const Pending& pending) {
    const syncbn::Exchange& exchange = *pending.waiting.exchange;
    const auto [entry, is_new] = results_.emplace(exchange.key, exchange.result);
    const Numbers& known = entry->second;
    CHECK(known == exchange.result, "rank ", actor.rank);
    if (!is_new) return;
    Numbers sums;
    double count = 0;
    const bool is_local = exchange.signature.ranks.empty();
    for (const int rank : is_local ? std::vector<int>{actor.rank} : exchange.signature.ranks) {
      double sum = NumberOf(rank, 0, pending.exchange);
      for (int id = 1; id < devices_[rank]; ++id) sum += NumberOf(rank, id, pending.exchange);
      sums.push_back(sum);
      count += devices_[rank];
    }
    const double sum = std::accumulate(sums.begin() + 1, sums.end(), sums[0]);
    CHECK_EQ(known[0], count);
    CHECK_NEAR(known[1], sum, sums.size() <= 32 ? 0 : 1e-12 * sum);
  }

  void Continue(Actor* actor) {
    try {
      while (!actor->over && Advance(actor)) continue;
    } catch (const syncbn::Error& error) {
      actor->over = true;
      CheckError(actor->rank, error.what());
    }
  }

  // True if the actor need not wait.
  bool Advance(Actor* actor) {
    Rank* const rank = ranks_[actor->rank].get();
    // A real program has a thread for each wait, so a pending wait must not delay the others.
    for (const Pending& pending : actor->pending) rank->IsOver(pending.waiting, now_);
    for (const Pending& pending : actor->pending) {
      const syncbn::Exchange& exchange = *pending.waiting.exchange;
      // The sum of the timeout (1 s), Table::Patience (3 s or 1 s), and the delay of messages.
      const std::chrono::milliseconds most(exchange.signature.ranks.size() > 32 ? 5550 : 2950);
      CHECK(now_ - pending.waiting.start < most, size_, " end ", static_cast<int>(end_));
      if (!exchange.error.empty()) throw syncbn::Error(exchange.error);
      if (!exchange.over) return false;
      CheckResult(*actor, pending);
    }
    actor->pending.clear();
    if (actor->phases == phases_) {
      actor->over = true;
      if (size_ <= 100 && AreOver(actor->rank)) rank->Leave();
      return false;
    }
    if (actor->rank == culprit_ && actor->phases >= phases_ - 2 && Ends(actor->rank)) return false;
    if (Below(16) == 0) return false;  // the actor is late
    Begin(actor);
    return true;
  }

  void Begin(Actor* actor) {
    const int phases = actor->phases++;
    const bool is_forward = phases % 2 == 0;
    std::vector<int> calls{0, 1, 2};
    if (is_forward) {
      std::rotate(calls.begin() + Below(3), calls.end() - 1, calls.end());
    } else {
      std::shuffle(calls.begin(), calls.end(), random_);
    }
    for (const int call : calls) {
      const bool is_some = call == 2;
      if (is_some && !std::binary_search(some_.begin(), some_.end(), actor->rank)) continue;
      const int exchange = 3 * phases + call;
      Contribution own = ContributionOf(&ranks_[actor->rank]->layers[is_some], actor->id);
      own.numbers.push_back(NumberOf(actor->rank, actor->id, exchange));
      own.phase = is_forward ? Phase::kForward : Phase::kBackward;
      own.devices = static_cast<size_t>(devices_[actor->rank]);
      if (is_some) own.signature.ranks = some_;
      own.timeout_seconds = 1;
      if (end_ == End::kDisagrees && actor->rank == culprit_ && phases >= phases_ - 2) {
        own.signature.channels = 2;
      }
      actor->pending.push_back(
          {ranks_[actor->rank]->Arrive(std::move(own), &actor->tickets[call], now_), exchange});
    }
  }

  // Let the culprit end the program. Return true if it takes no more steps.
  bool Ends(int rank) {
    if (end_ == End::kWell || end_ == End::kDisagrees) return false;
    if (end_ == End::kFails) ranks_[rank]->Fail("the ship sinks", true);
    if (end_ == End::kLeaves) ranks_[rank]->Leave();
    for (Actor& actor : actors_) actor.over = actor.over || actor.rank == rank;
    return true;
  }

  // The error of a rank must describe the action of the culprit.
  void CheckError(int rank, const std::string& error) const {
    const std::string culprit = "rank " + std::to_string(culprit_);
    if (end_ == End::kStops) CheckHas(error, culprit + ", which ");
    if (end_ == End::kFails) CheckHas(error, "the ship sinks");
    if (end_ == End::kLeaves) CheckHas(error, culprit + " has left");
    if (end_ == End::kDisagrees) CheckHas(error, "processes disagree: rank ");
    CHECK(end_ != End::kWell, "rank ", rank, " of ", size_, ": ", error);
  }

  const int size_;
  const End end_;
  const int phases_;
  std::mt19937 random_;
  Time now_{std::chrono::hours(1)};
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<int> devices_;  // how many each rank has
  std::vector<int> some_;
  std::vector<Actor> actors_;
  std::map<Key, Numbers> results_;
  int culprit_;
};

TEST(RandomPrograms) {
  Program(1024, 0, End::kWell).Run();  // its tree has two levels below the root
  const int programs = check::Rounds(3000, 300);
  for (int seed = 0; seed < programs; ++seed) {
    const End end = static_cast<End>(seed % kEnds);
    const int size = seed % 11 == 0 ? 30 + seed % 71 : (end == End::kWell ? 1 : 2) + seed % 13;
    Program(size, static_cast<uint32_t>(seed), end).Run();
  }
}

// ---- messages ----------------------------------------------------------------------------------

Rank RankOf(int rank, int size = 4) { return {std::make_shared<Network>(size), rank}; }

Waiting Begin(Rank* rank, const std::vector<int>& ranks) {
  Contribution own = ContributionOf(&rank->layers[0]);
  own.signature.ranks = ranks;
  Ticket ticket;
  return rank->Arrive(std::move(own), &ticket, Time());
}

const std::vector<int> kAll{0, 1, 2, 3};

PartMessage PartOf(const std::vector<int>& ranks, int64_t call = 0) {
  PartMessage part;
  part.key.layer = "all";
  part.key.call = call;
  part.signature.channels = 1;
  part.signature.ranks = ranks;
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
  CHECK(refuses(0, 3, PartOf({0, 1})), "the sender is missing");
  CHECK(refuses(1, 0, PartOf(kAll)), "the sender is not a child");
  Bytes bytes = Encode(PartOf(kAll));
  bytes[sizeof(uint64_t)] = 9;
  CHECK(Refuses(0, 1, bytes), "9 is not a kind of message");
  bytes = Encode(PartOf(kAll));
  const size_t whole = bytes.size();
  for (const size_t size : {whole + 9, whole + 1, whole - 1, size_t{9}, size_t{0}}) {
    bytes.resize(size);
    CHECK(Refuses(0, 1, bytes), size, " bytes");
  }
  Rank twice = RankOf(0);
  CHECK_EQ(twice.Handle(1, Encode(PartOf(kAll))), "");
  CheckHas(twice.Handle(1, Encode(PartOf(kAll))), kRefused);
}

TEST(ResultsThatAreRefused) {
  const std::vector<int> all, pair{1, 2};
  const auto result = [](size_t size) {
    ResultMessage message;
    message.key.layer = "all";
    message.numbers = Numbers(size);
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
  PartMessage part = PartOf(kAll);
  part.signature.ranks = {0, 1};
  Rank root = RankOf(0);
  root.Handle(1, Encode(part));
  own = ContributionOf(&root.layers[0]);
  own.signature.epsilon = 0.5;
  own.signature.ranks = {0, 1};
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
  rank.Handle(1, Encode(PartOf(kAll)));
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

// It reports them after 60 s. After a failure it waits for 30 s.
TEST(ARankThatHasLeftWaitsForTheOthers) {
  Rank rank = RankOf(0);
  rank.Leave();
  const auto at = [](int seconds) { return Time(std::chrono::seconds(seconds)); };
  syncbn::Departure departure{std::chrono::seconds(60), std::chrono::seconds(30), at(0), at(0)};
  for (const int seconds : {0, 59, 60}) {
    CHECK(!rank.MayClose(&departure, at(seconds)));
    CHECK_EQ(departure.is_reported, seconds == 60);
  }
  rank.Handle(1, Encode(syncbn::FailMessage{"the ship sinks"}));
  CHECK(!rank.MayClose(&departure, at(89)));
  CHECK(rank.MayClose(&departure, at(90)));
  CHECK(!rank.Disconnect(60, 0), "rank 1 hangs");
}

TEST(ACallIsNotReadyWhileItsMessagesAreBeingSent) {
  const auto network = std::make_shared<Network>(2);
  Rank root(network, 0), other(network, 1);
  Ticket ticket;
  const Waiting waiting = root.Begin(ContributionOf(&root.layers[0]), &ticket);
  other.Begin(ContributionOf(&other.layers[0]), &ticket);
  for (const bool is_busy : {true, false}) {
    network->is_busy = is_busy;
    CHECK_EQ(root.IsReady(waiting, {}), !is_busy);
  }
}

TEST(ARankClosesAfterItsMessagesWereSent) {
  static int questions = 0;
  struct Slow : LocalTransport {
    using LocalTransport::LocalTransport;
    bool Busy() const override { return ++questions < 3; }
    void Close() override { CHECK(questions >= 3, "messages are still being sent"); }
  };
  syncbn::Table rank;
  rank.Connect(std::make_unique<Slow>(std::make_shared<Network>(1), 0));
  CHECK(rank.Disconnect(10, 10));
  CHECK_EQ(questions, 3);
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
  CheckHas(receiver.Handle(2, Encode(PartOf(kAll))),
           "rank 2 synchronizes ranks 0, 1, 2, 3, but rank 0 has completed this call");
}

// No part of a rank that does not exist, or with another value, is merged.
TEST(PartsThatDoNotFit) {
  PartMessage parts[] = {PartOf({0, 1, 100}), PartOf({0, 1, 1}), PartOf(kAll), PartOf(kAll),
                         PartOf(kAll)};
  parts[2].signature.operation = static_cast<Operation>(-1);
  parts[3].signature.dtype = static_cast<syncbn::DType>(99);
  parts[4].signature.axis = 1;
  for (const PartMessage& part : parts) {
    Rank receiver = RankOf(0);
    CHECK_EQ(receiver.Handle(1, Encode(part)), "");
    CheckHas(ErrorOf([&] { Begin(&receiver, {}); }), "processes disagree: rank 1 has");
  }
}

// A rank's patience depends on it.
TEST(HeightOfTheTree) {
  const std::map<int, int> heights = {{1, 0}, {2, 1}, {4, 1}, {5, 2}, {16, 2}, {17, 3}};
  for (const auto& [size, height] : heights) {
    std::vector<int> all(size);
    std::iota(all.begin(), all.end(), 0);
    CHECK_EQ(syncbn::PositionOf(size - 1, all, 4).height, height, size, " ranks");
  }
}

TEST(TimeoutErrorsNameTheSubtree) {
  const auto error_without = [](int rank, int first, int last, int missing) {
    Rank receiver = RankOf(rank, 100);
    std::vector<int> all(100);
    std::iota(all.begin(), all.end(), 0);
    const Waiting waiting = Begin(&receiver, {});
    for (int from = first; from <= last; ++from) {
      if (from != missing) receiver.Handle(from, Encode(PartOf(all)));
    }
    CHECK(receiver.IsOver(waiting, Time(std::chrono::hours(1))));
    return waiting.exchange->error;
  };
  const std::string inner = error_without(32, 33, 63, 62);
  CheckHas(inner, "1 of 100 processes. Arrived: ranks 32, 33, 34");
  CheckHas(inner, "61, 63. Missing: rank 62, which has sent nothing yet.");
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
      return some;
    };
    std::string failure;
    for (int step = 0; step < 30 && failure.empty(); ++step, ++done) {
      if (below(6) == 0) ErrorOf([&] { waiting = Begin(&receiver, ranks()); });
      if (below(40) == 0) receiver.Leave();
      if (below(8) == 0 && waiting.exchange) {
        receiver.IsOver(waiting, Time(std::chrono::milliseconds(below(5000))));
      }
      PartMessage part = PartOf(ranks(), below(3));
      if (below(8) == 0) part.signature.ranks.push_back(below(2) == 0 ? 100 : 0);
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
