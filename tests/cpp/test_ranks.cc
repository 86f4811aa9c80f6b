// Test the promises of table.h between ranks: random programs of 2 to 100 ranks with one to three
// devices in simulated time, one exchange of 1,024 ranks, random messages, and threads that wait.
// GLUON_SYNCBN_NATIVE=full runs more programs and messages.
#include <array>
#include <cmath>
#include <numeric>
#include <string>

#include "check.h"
#include "ranks.h"

namespace {

using syncbn::Bytes;
using syncbn::Contribution;
using syncbn::Device;
using syncbn::Key;
using syncbn::Members;
using syncbn::Message;
using syncbn::MessageKind;
using syncbn::Numbers;
using syncbn::Operation;
using syncbn::Phase;
using syncbn::Ticket;
using syncbn::Time;
using syncbn::Waiting;

constexpr double kTimeout = 1;  // seconds
constexpr int kPhases = 16;     // forward and backward take turns

// Return a device's contribution to a layer's exchange.
Contribution Of(Members* members, const std::vector<int>& ranks = {}) {
  Contribution own;
  own.members = members;
  own.device = {"cpu", 0};
  own.shared_name = members->layer;
  own.signature.channels = 1;
  own.numbers = {1};
  own.ranks = ranks;
  own.timeout_seconds = kTimeout;
  return own;
}

// A program ends well, or by the deed of one rank, the culprit, in some step.
enum class End { kWell, kDies, kStops, kFails, kLeaves, kDisagrees };
constexpr int kEnds = 6;

struct Pending {
  std::unique_ptr<Contribution> own;
  Waiting waiting;
};
struct Actor {
  Actor(int of_rank, int of_id) : rank(of_rank), id(of_id) {}
  int rank, id;
  int phases = 0;  // begun phases; a step has two
  bool began = false, late = false, over = false;
  Ticket tickets[2] = {};
  std::vector<Pending> pending = {};
};

// All devices exchange in one layer in each step, and the devices of some ranks also in another
// layer, forward and then backward, in any order.
class Program {
 public:
  Program(int size, uint32_t seed, End end)
      : size_(size), end_(end), actors_(size), sim_(size, seed) {
    culprit_ = static_cast<int>(sim_.random() % size);
    const int most_devices = size > 13 ? 1 : 3;
    for (int rank = 0; rank < size; ++rank) {
      layers_.push_back({std::make_unique<Members>("all"), std::make_unique<Members>("some")});
      devices_.push_back(1 + static_cast<int>(sim_.random() % most_devices));
      if (sim_.random() % 3 > 0) some_.push_back(rank);
      for (int id = 0; id < devices_.back(); ++id) actors_[rank].emplace_back(rank, id);
    }
  }

  void Run() {
    sim_.wake = [this](int rank) {
      for (Actor& actor : actors_[rank]) {
        if (actor.began) Continue(&actor);
      }
    };
    for (auto& actors : actors_) {
      for (Actor& actor : actors) {
        sim_.After(sim_.Random(300000), [&] { actor.began = true, Continue(&actor); });
      }
    }
    int first = 0;  // the first rank that is not over
    const bool ended = sim_.RunUntil([&] {
      while (first < size_ && (sim_.dead[first] || IsOver(first))) ++first;
      return first == size_;
    });
    CHECK(ended, size_, " ranks, end ", static_cast<int>(end_));
    const Time settled = sim_.now() + std::chrono::seconds(1);
    sim_.RunUntil([&] { return sim_.now() > settled; });
    for (int rank = 0; rank < size_; ++rank) {
      if (sim_.dead[rank]) continue;
      sim_.ranks[rank]->ServeAll();
      CHECK(end_ != End::kWell || sim_.ranks[rank]->AllHaveLeft());
      CHECK_EQ(sim_.ranks[rank]->InFlight(), 0u, "rank ", rank, " end ", static_cast<int>(end_));
    }
  }

 private:
  bool IsOver(int rank) const {
    const std::vector<Actor>& actors = actors_[rank];
    return std::all_of(actors.begin(), actors.end(), [](const Actor& actor) { return actor.over; });
  }

  // The order of these numbers changes their sum.
  double NumberOf(int rank, int id, int phases) const {
    return std::pow(10, (7 * rank + 5 * id + phases) % 17) * (1 + rank) / 3;
  }

  // All ranks get the same bits. A star sums in the order of devices and ranks.
  void CheckResult(const Actor& actor, const syncbn::Exchange& exchange) {
    const Numbers& known = results_.emplace(exchange.key, exchange.result).first->second;
    CHECK(known == exchange.result, "rank ", actor.rank);
    Numbers sums;
    double count = 0;
    const bool is_local = exchange.ranks.empty();
    for (const int rank : is_local ? std::vector<int>{actor.rank} : exchange.ranks) {
      double sum = NumberOf(rank, 0, actor.phases - 1);
      for (int id = 1; id < devices_[rank]; ++id) sum += NumberOf(rank, id, actor.phases - 1);
      sums.push_back(sum);
      count += devices_[rank];
    }
    const double sum = std::accumulate(sums.begin() + 1, sums.end(), sums[0]);
    CHECK_EQ(known[0], count);
    CHECK_NEAR(known[1], sum, sums.size() <= 32 ? 0 : 1e-12 * sum);
  }

  void Continue(Actor* actor) {
    if (actor->over || actor->late || sim_.dead[actor->rank]) return;
    try {
      while (Advance(actor)) continue;
    } catch (const syncbn::Error& error) {
      actor->over = true;
      CheckError(actor->rank, error.what());
    }
  }

  // True if the actor need not wait.
  bool Advance(Actor* actor) {
    Rank* const rank = sim_.ranks[actor->rank].get();
    // Each wait stands for a thread, so it ends by itself.
    for (Pending& pending : actor->pending) rank->IsOver(&pending.waiting, sim_.now());
    for (Pending& pending : actor->pending) {
      const syncbn::Exchange& exchange = *pending.waiting.exchange;
      const auto waited = sim_.now() - pending.waiting.start;
      // The timeout, the time in which others are late, and the patience of the tree.
      CHECK(waited < std::chrono::milliseconds(exchange.ranks.size() > 32 ? 5550 : 2950), "rank ",
            actor->rank, " of ", size_, " end ", static_cast<int>(end_));
      if (!exchange.error.empty()) throw syncbn::Error(exchange.error);
      if (!exchange.over) return false;
      CheckResult(*actor, exchange);
    }
    actor->pending.clear();
    if (actor->phases == kPhases) {
      actor->over = true;
      if (IsOver(actor->rank)) rank->Leave();
      return false;
    }
    if (actor->rank == culprit_ && actor->phases >= kPhases - 2 && Ends(actor)) return false;
    if (sim_.random() % 16 == 0) {
      actor->late = true;
      sim_.After(sim_.Random(400000), [=] {
        actor->late = false;
        if (!actor->over && !sim_.dead[actor->rank]) Begin(actor), Continue(actor);
      });
      return false;
    }
    Begin(actor);
    return !actor->over;
  }

  void Begin(Actor* actor) {
    const int phases = actor->phases++;
    const int first = static_cast<int>(sim_.random() % 2);
    for (const int layer : {first, 1 - first}) {
      const bool is_in = std::binary_search(some_.begin(), some_.end(), actor->rank);
      if (layer == 1 && !is_in) continue;
      auto own = std::make_unique<Contribution>(
          Of(layers_[actor->rank][layer].get(), layer == 1 ? some_ : std::vector<int>()));
      own->phase = phases % 2 == 0 ? Phase::kForward : Phase::kBackward;
      own->device.id = actor->id;
      own->devices = static_cast<size_t>(devices_[actor->rank]);
      own->numbers = {1, NumberOf(actor->rank, actor->id, phases)};
      if (end_ == End::kDisagrees && actor->rank == culprit_ && phases >= kPhases - 2) {
        own->signature.channels = 2;
      }
      try {
        Waiting waiting = sim_.ranks[actor->rank]->Arrive(*own, &actor->tickets[layer], sim_.now());
        actor->pending.push_back({std::move(own), std::move(waiting)});
      } catch (const syncbn::Error& error) {
        actor->over = true;
        return CheckError(actor->rank, error.what());
      }
    }
  }

  // Run the culprit's deed. Return true if it takes no more steps.
  bool Ends(Actor* actor) {
    if (end_ == End::kWell || end_ == End::kDisagrees) return false;
    if (end_ == End::kFails) sim_.ranks[actor->rank]->Fail("the ship sinks", true);
    if (end_ == End::kLeaves) sim_.ranks[actor->rank]->Leave();
    sim_.dead[actor->rank] = end_ == End::kDies;
    for (Actor& other : actors_[actor->rank]) other.over = true;
    return true;
  }

  // All ranks receive a message about the culprit, or find out by waiting.
  void CheckError(int rank, const std::string& error) const {
    const std::string culprit = "rank " + std::to_string(culprit_);
    if (end_ == End::kDies || end_ == End::kStops) CheckHas(error, culprit + ", which ");
    if (end_ == End::kFails) CheckHas(error, "the ship sinks");
    if (end_ == End::kLeaves) CheckHas(error, culprit + " has left");
    if (end_ == End::kDisagrees) CheckHas(error, "processes disagree: rank ");
    CHECK(end_ != End::kWell, "rank ", rank, " of ", size_, ": ", error);
  }

  const int size_;
  const End end_;
  std::vector<std::vector<Actor>> actors_;  // each rank's actors
  Simulation sim_;
  std::vector<std::array<std::unique_ptr<Members>, 2>> layers_;  // each rank's layers
  std::vector<int> devices_;                                     // how many each rank has
  std::vector<int> some_;
  std::map<Key, Numbers> results_;
  int culprit_;
};

TEST(RandomPrograms) {
  const int programs = check::Rounds(check::Times(3000, 300));
  for (int seed = 0; seed < programs; ++seed) {
    const int size = seed % 10 == 0 ? 30 + seed % 71 : 2 + seed % 13;
    Program(size, static_cast<uint32_t>(seed), static_cast<End>(seed % kEnds)).Run();
  }
}

// The tree has two levels above the leaves. The ranks arrive in a random order.
TEST(AThousandRanks) {
  constexpr int kSize = 1024;
  Simulation sim(kSize, 1);
  std::vector<std::unique_ptr<Members>> layers(kSize);
  std::vector<Contribution> parts(kSize);
  std::vector<Ticket> tickets(kSize);
  std::vector<Waiting> waiting(kSize);
  for (int rank = 0; rank < kSize; ++rank) {
    layers[rank] = std::make_unique<Members>("all");
    parts[rank] = Of(layers[rank].get());
    parts[rank].numbers = {static_cast<double>(rank)};
    sim.After(sim.Random(100000), [&, rank] {
      waiting[rank] = sim.ranks[rank]->Arrive(parts[rank], &tickets[rank], sim.now());
    });
  }
  sim.wake = [&](int rank) {
    if (waiting[rank].exchange) sim.ranks[rank]->IsOver(&waiting[rank], sim.now());
  };
  CHECK(sim.RunUntil([&] {
    return std::all_of(waiting.begin(), waiting.end(),
                       [](const Waiting& w) { return w.exchange && w.exchange->over; });
  }));
  for (const Waiting& w : waiting) CHECK(w.exchange->result == Numbers{kSize * (kSize - 1) / 2.0});
}

// ---- messages ----------------------------------------------------------------------------------

// A rank of four that receives made-up messages.
struct Receiver {
  explicit Receiver(int rank, int size = 4)
      : number(rank), network(std::make_shared<Network>(size)), table(network, rank) {}
  void Handle(int from, const Bytes& bytes) {
    network->Deliver(from, number, bytes);
    table.ServeAll();
  }
  void Begin(const std::vector<int>& ranks) {
    parts.push_back(std::make_unique<Contribution>(Of(&layer, ranks)));
    waiting = table.Arrive(*parts.back(), &ticket, Time());
  }

  const int number;
  std::shared_ptr<Network> network;
  Rank table;
  Members layer{"all"};
  Ticket ticket;
  std::vector<std::unique_ptr<Contribution>> parts;
  Waiting waiting;
};

Message PartOf(const std::vector<int>& ranks, int64_t call = 0) {
  Message part;
  part.key.layer = "all";
  part.key.call = call;
  part.signature.channels = 1;
  part.ranks = ranks;
  part.numbers = {1};
  return part;
}

// A rank refuses messages that no process of this version sends.
TEST(MessagesThatAreRefused) {
  struct Case {
    int rank, from;
    Message message;
  };
  std::vector<Case> cases = {
      {0, 1, PartOf({1})},          // the receiver is missing
      {3, 1, PartOf({1, 2})},       // the same
      {0, 1, PartOf({0, 1, 100})},  // a rank that does not exist
      {1, 2, PartOf({-1, 1, 2})},   // the same
      {0, 1, PartOf({1, 0})},       // not ascending
      {0, 3, PartOf({0, 1})},       // the sender is missing
      {1, 0, PartOf({})},           // the sender is the parent
      {0, 0, PartOf({})},           // the sender is the receiver
      {0, 1, PartOf({}, -1)},       // not a number of a call
      {0, 1, PartOf({}, int64_t{1} << 60)},
  };
  Message wrong = PartOf({});
  wrong.kind = static_cast<MessageKind>(9);
  cases.push_back({0, 1, wrong});
  wrong = PartOf({});
  wrong.signature.operation = static_cast<Operation>(-1);
  cases.push_back({0, 1, wrong});
  for (const Case& c : cases) {
    Receiver receiver(c.rank);
    receiver.Handle(c.from, Encode(c.message));
    CheckHas(receiver.table.Failure(), "another version", "test_ranks.cc", c.rank);
    CHECK_EQ(receiver.table.InFlight(), 0u);
  }
  for (const size_t size : {0, 9, 1000}) {  // cut, or too long
    Receiver receiver(0);
    Bytes bytes = Encode(PartOf({}));
    bytes.resize(size);
    receiver.Handle(1, bytes);
    CheckHas(receiver.table.Failure(), "another version");
  }
}

// A part comes twice; a result is not awaited, has another size, or does not come from the parent.
TEST(PartsAndResultsThatDoNotFit) {
  Receiver twice(0);
  for (int i = 0; i < 2; ++i) twice.Handle(1, Encode(PartOf({})));
  CheckHas(twice.table.Failure(), "another version");
  Message result = PartOf({});
  result.kind = MessageKind::kResult;
  for (int i = 0; i < 5; ++i) {
    Receiver receiver(1);
    if (i == 1) result.numbers = Numbers(2);
    if (i == 3) result.numbers = Numbers(1);
    if (i > 0 && i < 4) receiver.Begin({});
    if (i == 4) receiver.Begin({1, 2});  // it waits for the part of rank 2, and has no parent
    receiver.Handle(i == 2 ? 2 : 0, Encode(result));
    CHECK_EQ(receiver.table.Failure().empty(), i == 3, i);
    if (i == 3) CHECK(receiver.waiting.exchange->over);
  }
}

// The other ranks' exchange may have ended many exchanges ago.
TEST(GroupsThatDiffer) {
  for (const int calls : {1, 100}) {
    Receiver receiver(0);
    for (int call = 0; call < calls; ++call) {
      receiver.Begin({0, 1});
      receiver.Handle(1, Encode(PartOf({0, 1}, call)));
      CHECK(receiver.waiting.exchange->over);
    }
    receiver.Handle(2, Encode(PartOf({})));
    CheckHas(receiver.table.Failure(),
             "rank 0 has channels=1, dtype=float32, axis=0, epsilon=0 "
             "(synchronized: ranks 0, 1), but rank 2 has channels=1");
  }
}

// Random and mutated messages end in a failure with a text, or wait.
TEST(RandomMessages) {
  std::mt19937 random(7);
  const auto below = [&](uint32_t size) { return static_cast<int>(random() % size); };
  const int messages = check::Rounds(check::Times(2'000'000, 100'000));
  for (int done = 0; done < messages;) {
    const int size = 2 + below(5) + (below(10) == 0 ? 60 : 0);
    Receiver receiver(below(size), size);
    std::vector<Bytes> sent;
    receiver.network->send = [&](int, int to, Bytes bytes) {
      CHECK(0 <= to && to < size && to != receiver.number, to);
      sent.push_back(std::move(bytes));
    };
    const auto ranks = [&] {
      std::vector<int> some;
      for (int rank = 0; rank < size; ++rank) {
        if (rank == receiver.number || below(3) > 0) some.push_back(rank);
      }
      if (below(8) == 0) some.push_back(below(2) == 0 ? 100 : some.front());
      return below(2) == 0 ? std::vector<int>() : some;
    };
    for (int step = 0; step < 30 && receiver.table.Failure().empty(); ++step, ++done) {
      if (below(6) == 0) ErrorOf([&] { receiver.Begin(ranks()); });
      if (below(40) == 0) receiver.table.Leave();
      if (below(8) == 0 && receiver.waiting.exchange) {
        receiver.table.IsOver(&receiver.waiting, Time(std::chrono::milliseconds(below(5000))));
      }
      Message message = PartOf(ranks(), below(3));
      message.kind = static_cast<MessageKind>(below(12) == 0 ? below(6) : below(2));
      message.key.phase = static_cast<Phase>(below(12) == 0 ? below(5) : 0);
      message.signature.operation = static_cast<Operation>(below(9) / 4);
      message.numbers.resize(static_cast<size_t>(below(20) == 0 ? below(70000) : 1));
      Bytes bytes = Encode(message);
      if (!sent.empty() && below(6) == 0) bytes = sent[random() % sent.size()];
      for (int mutation = below(4) == 0 ? 1 + below(3) : 0; mutation > 0; --mutation) {
        const size_t at = bytes.empty() ? 0 : random() % bytes.size();
        const int how = below(4);
        const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(at);
        if (how == 1) bytes.insert(begin, 9, '\x7f');
        if (how == 2 && !bytes.empty()) bytes[at] = static_cast<char>(random());
        if (how == 3 && bytes.size() >= at + 8) std::fill_n(begin, 8, '\xff');
        if (how == 0) bytes.resize(at);
      }
      receiver.Handle(below(static_cast<uint32_t>(size)), bytes);
    }
  }
}

// ---- threads -----------------------------------------------------------------------------------

// After a failure a rank ends the others only if one of them does not leave.
TEST(ARankThatDoesNotLeave) {
  const auto network = std::make_shared<Network>(2);
  Rank first(network, 0), second(network, 1);
  first.Fail("the ship sinks", true);
  second.Leave();
  CHECK(first.Disconnect(1, 1));
  CHECK(second.Disconnect(1, 1));
  Rank third(std::make_shared<Network>(2), 0);
  third.Fail("the ship sinks", true);
  CHECK(!third.Disconnect(1, 0.01));
}

// Each rank has two devices and three layers, whose exchanges meet in any order. Then rank 0 fails,
// and all waits end, also a wait for a device of the same rank.
TEST(ThreadsThatWait) {
  constexpr int kRanks = 4, kLayers = 3, kDevices = 2;
  const auto network = std::make_shared<Network>(kRanks);
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<std::unique_ptr<Members>> layers;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(std::make_unique<Rank>(network, rank));
    for (int layer = 0; layer < kLayers; ++layer) {
      layers.push_back(std::make_unique<Members>(std::to_string(layer)));
    }
  }
  const auto exchange = [&](int i, Ticket* ticket, Phase phase) {
    Contribution part = Of(layers[i / kDevices].get());
    part.device.id = i % kDevices;
    part.devices = kDevices;
    part.timeout_seconds = 60;
    part.phase = phase;
    return ranks[i / kDevices / kLayers]->Contribute(part, ticket);
  };
  Parallel(kRanks * kLayers * kDevices, [&](int i) {
    Ticket ticket;
    for (int n = 0; n < check::Rounds(200); ++n) {
      for (const Phase phase : {Phase::kForward, Phase::kBackward}) {
        CHECK(exchange(i, &ticket, phase) == Numbers{kRanks * kDevices});
      }
    }
  });
  Parallel(kRanks * kLayers * kDevices, [&](int i) {
    Ticket ticket;
    if (i == 0) {
      Sleep(20);
      ranks[0]->Fail("the ship sinks", true);
    } else if (i % kDevices == 0) {  // the other device never comes
      CheckHas(ErrorOf([&] { exchange(i, &ticket, Phase::kForward); }), "the ship sinks");
    }
  });
  Parallel(kRanks, [&](int rank) {
    CHECK(ranks[rank]->Disconnect(10, 10));
    CheckHas(ranks[rank]->Failure(), "the ship sinks");
  });
}

TEST(NothingBeginsAfterLeaving) {
  Receiver receiver(1);
  receiver.table.Leave();
  CheckHas(ErrorOf([&] { receiver.Begin({}); }), "called after gluon_syncbn.distributed.shut");
  receiver.Begin({1});  // the devices of this process go on
  CHECK(receiver.waiting.exchange->over);
}

}  // namespace

int main() { return check::RunTests(); }
