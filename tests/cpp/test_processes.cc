// Tests what processes promise each other (protocol.h): random programs of 2 to 100 ranks in
// simulated time, an exchange of 1,024, and threads that wait for a Communicator.
// GLUON_SYNCBN_NATIVE=full runs more of them.
#include <string>
#include <thread>

#include "check.h"
#include "collective/processes/communicator.h"
#include "local_transport.h"
#include "simulation.h"

namespace {

using syncbn::Bytes;
using syncbn::ReduceOperation;
using syncbn::Time;

constexpr double kTimeout = 1;  // seconds
constexpr int kSteps = 8;

syncbn::Contribution Of(const std::string& name, const std::string& key, std::vector<int> ranks) {
  syncbn::Contribution own;
  own.key = key;
  own.title = "layer '" + name + "'";
  own.signature = "channels=1";
  own.timeout_seconds = kTimeout;
  own.ranks = std::move(ranks);
  return own;
}

// How a program ends: as it should, or by what one rank, the culprit, does in some step.
enum class End { kWell, kDies, kStops, kFails, kLeaves, kDisagrees };
constexpr int kEnds = 6;

// Ranks take steps, in which all exchange in one group and some in another one, in any order.
class Program {
 public:
  Program(int size, uint32_t seed, End end)
      : size_(size), end_(end), sim_(size, seed), state_(size), group_(2) {
    culprit_ = static_cast<int>(sim_.random() % size);
    for (int rank = 0; rank < size; ++rank) {
      group_[0].push_back(rank);
      if (sim_.random() % 3 > 0) group_[1].push_back(rank);
    }
  }

  void Run() {
    for (int rank = 0; rank < size_; ++rank) {
      sim_.tasks[rank] = [this, rank] { Continue(rank); };
      sim_.After(sim_.Random(300000), sim_.tasks[rank]);
    }
    const bool ended = sim_.RunUntil([this] {
      for (int rank = 0; rank < size_; ++rank) {
        if (!state_[rank].over && !sim_.dead[rank]) return false;
      }
      return end_ != End::kWell || sim_.ranks[0]->AllHaveLeft();
    });
    CHECK(ended, size_, " ranks, end ", static_cast<int>(end_));
    const Time settled = sim_.now() + std::chrono::seconds(1);
    sim_.RunUntil([&] { return sim_.now() > settled; });
    for (const auto& rank : sim_.ranks) CHECK(rank->Idle() || sim_.dead[&rank - &sim_.ranks[0]]);
  }

 private:
  struct State {
    int step = 0;
    bool late = false, over = false;
    std::vector<std::pair<std::shared_ptr<syncbn::Exchange>, Bytes>> pending;  // and their results
  };

  Bytes ResultOf(int group, int step) const {
    Bytes ranks;
    double sum = 0;
    for (const int rank : group_[group]) {
      ranks.push_back(static_cast<char>(rank));
      sum += rank + 1e3 * step;
    }
    return group == 1 ? ranks : syncbn::ToBytes<double>({sum});
  }

  void Continue(int rank) {
    State& state = state_[rank];
    if (state.over || state.late || sim_.dead[rank]) return;
    try {
      while (Advance(rank, &state)) continue;
    } catch (const syncbn::Error& error) {
      state.over = true;
      CheckError(rank, error.what());
    }
  }

  // True if the rank need not wait.
  bool Advance(int rank, State* state) {
    syncbn::Protocol* const protocol = sim_.ranks[rank].get();
    for (auto& [exchange, right] : state->pending) {
      const auto waited = sim_.now() - exchange->start;
      CHECK(waited < std::chrono::milliseconds(1550), "rank ", rank);
      if (!exchange->error.empty()) throw syncbn::Error(exchange->error);
      if (!exchange->done) return false;
      CHECK(exchange->result == right, "rank ", rank);
    }
    state->pending.clear();
    if (state->step == kSteps) {
      protocol->Leave();
      state->over = true;
      return false;
    }
    if (rank == culprit_ && state->step == kSteps - 1) {
      if (Ends(rank, state)) return false;
    }
    if (sim_.random() % 8 == 0) {
      state->late = true;
      sim_.After(sim_.Random(400000), [=] {
        state->late = false;
        if (!sim_.dead[rank]) BeginStep(rank, state), Continue(rank);
      });
      return false;
    }
    BeginStep(rank, state);
    return true;
  }

  void BeginStep(int rank, State* state) {
    const int first = static_cast<int>(sim_.random() % 2);
    for (const int group : {first, 1 - first}) {
      if (!std::count(group_[group].begin(), group_[group].end(), rank)) continue;
      const std::string name = group == 0 ? "all" : "some";
      const std::string key = sim_.ranks[rank]->NextKey(name);
      syncbn::Contribution own = Of(name, key, group_[group]);
      if (group == 0) own.payload = syncbn::ToBytes<double>({rank + 1e3 * state->step});
      if (group == 1) own.payload = {static_cast<char>(rank)};
      if (group == 1) own.operation = ReduceOperation::kConcat;
      if (disagrees_ && rank == culprit_) own.signature = "channels=2";
      try {
        auto exchange = sim_.ranks[rank]->Begin(std::move(own), sim_.now());
        state->pending.emplace_back(exchange, ResultOf(group, state->step));
      } catch (const syncbn::Error& error) {
        state->over = true;
        return CheckError(rank, error.what());
      }
    }
    ++state->step;
  }

  // What the culprit does; true if it takes no step any more.
  bool Ends(int rank, State* state) {
    syncbn::Protocol* const protocol = sim_.ranks[rank].get();
    disagrees_ = end_ == End::kDisagrees;
    if (end_ == End::kFails) protocol->Fail("the ship sinks");
    if (end_ == End::kLeaves) protocol->Leave();
    sim_.dead[rank] = end_ == End::kDies;
    state->over = end_ != End::kWell && !disagrees_;
    return state->over;
  }

  // All are told of the culprit, or wait for it by themselves.
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
  Simulation sim_;
  std::vector<State> state_;
  std::vector<std::vector<int>> group_;
  int culprit_;
  bool disagrees_ = false;
};

TEST(RandomPrograms) {
  const int programs = check::Rounds(check::Times(3000, 300));
  for (int seed = 0; seed < programs; ++seed) {
    const int size = seed % 10 == 0 ? 30 + seed % 71 : 2 + seed % 13;
    Program(size, seed, static_cast<End>(seed % kEnds)).Run();
  }
}

// Also where the other ranks' exchange has ended before.
TEST(GroupsThatDiffer) {
  Simulation sim(3, 0);
  std::vector<std::shared_ptr<syncbn::Exchange>> pair;
  for (int rank : {0, 1}) pair.push_back(sim.ranks[rank]->Begin(Of("a", "a", {0, 1}), sim.now()));
  CHECK(sim.RunUntil([&] { return pair[0]->done && pair[1]->done; }));
  const auto other = sim.ranks[2]->Begin(Of("a", "a", {}), sim.now());
  CHECK(sim.RunUntil([&] { return !other->error.empty(); }));
  CheckHas(other->error, "rank 0 has channels=1 (synchronized: ranks 0, 1), but rank 2 has");
}

// In the order of ranks, in two levels above the leaves, whatever the order of arrival.
TEST(AThousandRanks) {
  constexpr int kSize = 1024;
  Simulation sim(kSize, 1);
  std::vector<std::shared_ptr<syncbn::Exchange>> exchanges(kSize);
  std::vector<int> right;
  for (int rank = 0; rank < kSize; ++rank) {
    right.push_back(rank);
    sim.After(sim.Random(100000), [&, rank] {
      syncbn::Contribution own = Of("all", "all", {});
      own.operation = ReduceOperation::kConcat;
      own.payload = syncbn::ToBytes<int>({rank});
      exchanges[rank] = sim.ranks[rank]->Begin(std::move(own), sim.now());
    });
  }
  CHECK(sim.RunUntil([&] {
    return std::all_of(exchanges.begin(), exchanges.end(), [](auto& e) { return e && e->done; });
  }));
  for (const auto& exchange : exchanges) CHECK(exchange->result == syncbn::ToBytes(right));
}

// Messages that no process of this version sends are refused, whatever they ask of a rank.
TEST(MessagesThatAreRefused) {
  using syncbn::MessageKind;
  struct Case {
    int rank, from;
    MessageKind kind;
    std::vector<int> ranks;
    int64_t number;
  };
  const Case cases[] = {
      {0, 1, MessageKind::kPart, {1}, 0},       // without the receiver
      {3, 1, MessageKind::kPart, {1, 2}, 0},    // the same
      {0, 1, MessageKind::kPart, {0, 100}, 0},  // a rank that there is not
      {0, 3, MessageKind::kPart, {0, 1}, 0},    // without the sender
      {1, 0, MessageKind::kPart, {}, 0},        // from the parent
      {1, 0, MessageKind::kResult, {}, 0},      // of an exchange that has sent nothing
      {0, 1, MessageKind::kLate, {}, int64_t{1} << 62},
      {0, 1, MessageKind::kLate, {}, -1},
  };
  for (const Case& c : cases) {
    syncbn::Protocol protocol(c.rank, 4, [](int, Bytes) {});
    if (c.kind == MessageKind::kResult) {  // which waits for the part of rank 2
      protocol.Begin(Of("all", "all", {1, 2}), Time());
    }
    syncbn::Message message(c.kind);
    message.key = "all";
    message.ranks = c.ranks;
    message.number = c.number;
    protocol.Handle(c.from, Encode(message), Time());
    CheckHas(protocol.failure(), "another version");
    CHECK(protocol.Idle());
  }
  syncbn::Protocol protocol(3, 4, [](int, Bytes) {});
  const auto begin = [&] { protocol.Begin(Of("all", "all", {1, 2}), Time()); };
  CheckHas(ErrorOf(begin), "synchronizes other ranks, but this is rank 3");
}

// After a failure a rank ends the others only if one of them does not leave.
TEST(ARankThatDoesNotLeave) {
  const auto network = std::make_shared<Network>(2);
  const auto make = [&](int rank) {
    return syncbn::Communicator(std::make_unique<LocalTransport>(network, rank));
  };
  syncbn::Communicator first = make(0), second = make(1);
  first.Fail("the ship sinks");
  second.Leave();
  CHECK(first.Close());
  CHECK(second.Close());
}

// Each rank has three threads, whose exchanges meet in any order; then rank 0 fails, and all waits end.
TEST(ThreadsThatWait) {
  constexpr int kRanks = 5, kThreads = 3;
  const auto network = std::make_shared<Network>(kRanks);
  std::vector<std::unique_ptr<syncbn::Communicator>> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    auto transport = std::make_unique<LocalTransport>(network, rank);
    ranks.push_back(std::make_unique<syncbn::Communicator>(std::move(transport)));
  }
  const auto exchange = [&](int i) {
    const std::string name = std::to_string(i / kRanks);
    syncbn::Contribution part = Of(name, ranks[i % kRanks]->NextKey(name), {});
    part.payload = syncbn::ToBytes<double>({1});
    part.timeout_seconds = 60;
    return ranks[i % kRanks]->AllReduce(std::move(part));
  };
  Parallel(kRanks * kThreads, [&](int i) {
    for (int n = 0; n < check::Rounds(200); ++n) {
      CHECK(exchange(i) == syncbn::ToBytes<double>({kRanks}));
    }
  });
  Parallel(kRanks * kThreads, [&](int i) {
    if (i == 0) {
      Sleep(20);
      ranks[0]->Fail("the ship sinks");
    } else if (i % kRanks != 0) {
      CheckHas(ErrorOf([&] { exchange(i); }), "the ship sinks");
    }
  });
  Parallel(kRanks, [&](int rank) {
    CheckHas(ranks[rank]->Failure(), "the ship sinks");
    ranks[rank]->Leave();
    ranks[rank]->AwaitLeave(10);
    CheckHas(ErrorOf([&] { ranks[rank]->AllReduce(Of("late", "late", {})); }), "called after");
  });
}

}  // namespace

int main() { return check::RunTests(); }
