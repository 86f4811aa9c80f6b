// Tests exchanges of up to 1,024 simulated ranks: the same bits in every order, late and dead
// ranks, and the texts of errors. test_soak.cc has ranks that join, and connections that break.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "check.h"
#include "simulation.h"

namespace {

using namespace simulation;
using syncbn::Contribution;

// One exchange of all ranks.
class Exchange {
 public:
  explicit Exchange(Simulation* sim) : pending(sim->ranks.size()), sim_(sim) {}

  // A rank that was told of a failure before it begins has an error at once.
  void Begin(int rank, Contribution own) {
    try {
      pending[rank] = sim_->ranks[rank].protocol->Begin(std::move(own), sim_->now());
    } catch (const syncbn::Error& error) {
      pending[rank] = std::make_shared<syncbn::PendingExchange>();
      pending[rank]->error = error.what();
      pending[rank]->begun = sim_->now();
    }
  }
  // All ranks begin at once.
  void Begin(const Contribution& own) {
    for (int rank = 0; rank < sim_->size(); ++rank) Begin(rank, own);
  }
  bool Over() {
    while (over_ < pending.size() &&
           (sim_->ranks[over_].dead || (pending[over_] && pending[over_]->over()))) {
      ++over_;
    }
    return over_ == pending.size();
  }
  void Run() {
    CHECK(sim_->RunUntil([this] { return Over(); }));
  }
  const std::string& Error(int rank) const { return pending[rank]->error; }

  std::vector<std::shared_ptr<syncbn::PendingExchange>> pending;  // by rank

 private:
  Simulation* const sim_;
  size_t over_ = 0;  // of the first ranks
};

void CheckIdle(const Simulation& sim) {
  for (const auto& rank : sim.ranks) CHECK(rank.protocol->Idle());
}

// ---- numbers -----------------------------------------------------------------------------------

// The results of three exchanges in flight at once, which each rank begins in another order and at
// other times. Payloads do not depend on the seed.
std::vector<Bytes> Shuffled(int size, uint32_t seed) {
  Simulation sim(size, seed);
  sim.delay = RandomDelay(&sim);
  std::vector<Exchange> exchanges(3, Exchange(&sim));
  std::mt19937 values(7);
  std::normal_distribution<double> normal(0, 1e3);
  for (int rank = 0; rank < size; ++rank) {
    std::vector<double> moments(9);  // count, mean and m2 of four channels; some shards are empty
    if (rank % 5 > 0) {
      for (double& number : moments) number = std::fabs(normal(values));
      moments[0] = rank % 5;
    }
    const std::vector<Contribution> own = {
        Of("sum", ToBytes(moments)), Of("moments", ToBytes(moments), ReduceOperation::kMoments),
        Of("order", ToBytes<int>({rank}), ReduceOperation::kConcat)};
    std::vector<int> order = {0, 1, 2};
    std::shuffle(order.begin(), order.end(), sim.random);
    for (int i : order) {
      // Beyond half of the timeout ranks ask each other: very many messages.
      const microseconds late(sim.random() % (rank % 7 > 0 ? 2000 : size > 100 ? 450000 : 900000));
      sim.After(late, [&exchanges, rank, i, contribution = own[i]] {
        exchanges[i].Begin(rank, contribution);
      });
    }
  }
  std::vector<Bytes> results;
  for (Exchange& exchange : exchanges) {
    exchange.Run();
    results.push_back(exchange.pending[0]->Result());
    for (int rank = 1; rank < size; ++rank) {
      CHECK(exchange.pending[rank]->Result() == results.back());
    }
  }
  CheckIdle(sim);
  return results;
}

TEST(SameBitsInEveryOrder) {
  for (int size : {1, 2, 3, 4, 5, 6, 7, 13, 64, 100, 256, 1024}) {
    const auto expected = Shuffled(size, 0);
    std::vector<int> ranks(size);
    std::iota(ranks.begin(), ranks.end(), 0);
    CHECK(FromBytes<int>(expected[2]) == ranks, size, " ranks");
    const int shards = size / 5, rows = 10 * shards + (size % 5) * (size % 5 - 1) / 2;
    CHECK_EQ(FromBytes<double>(expected[0])[0], rows);
    CHECK_EQ(FromBytes<double>(expected[1])[0], rows);
    CHECK(Shuffled(size, 1) == expected, size, " ranks");
  }
}

// ---- death -------------------------------------------------------------------------------------

// A rank dies before it begins, while parts are under way, or long after its own have arrived,
// while all wait for a late one. Ranks that wait for it are told within the timeout; returns their
// number.
int Die(int size, uint32_t seed) {
  Simulation sim(size, seed);
  sim.delay = RandomDelay(&sim);
  Exchange exchange(&sim);
  const int dead = static_cast<int>(sim.random() % size);
  const int late = static_cast<int>(sim.random() % size);
  const int begins = seed % 3 == 2 ? 900000 : 100000, dies = seed % 3 == 0 ? 2000 : 1500000;
  const Time death = Time() + microseconds(sim.random() % dies);
  sim.After(death - Time(), [&] { sim.ranks[dead].dead = true; });
  std::vector<Time> ended(size);
  for (int rank = 0; rank < size; ++rank) {
    sim.ranks[rank].task = [&, rank] {
      const auto& pending = exchange.pending[rank];
      if (pending && pending->over() && ended[rank] == Time()) ended[rank] = sim.now();
    };
    sim.After(microseconds(rank == late ? begins : sim.random() % 100000), [&, rank] {
      if (sim.ranks[rank].dead) return;
      exchange.Begin(rank, Of("norm", ToBytes<double>({1})));
      sim.Resume(rank);
    });
  }
  CHECK(sim.RunUntil([&] { return death <= sim.now() && exchange.Over(); }), "seed ", seed);
  // The others ask after half of the timeout: a late rank may have answered before it died.
  const bool answered = dead == late && death > Time() + kTimeout / 2;
  int told = 0;
  for (int rank = 0; rank < size; ++rank) {
    if (rank == dead || exchange.Error(rank).empty()) continue;
    ++told;
    CheckHas(
        exchange.Error(rank),
        syncbn::Concat("rank ", dead, answered ? ", which runs, but" : ", which does not answer"));
    const auto waited = ended[rank] - std::max(death, exchange.pending[rank]->begun);
    CHECK(waited <= kTimeout + 2 * kTick + milliseconds(20), "rank ", rank, ", seed ", seed, ": ",
          waited.count(), " ns");
  }
  return told;
}

TEST(DeathIsReportedWithinTheTimeout) {
  int told = 0;
  const uint32_t deaths = check::Times(300, 15);
  for (uint32_t seed = 0; seed < deaths; ++seed) told += Die(64, seed);
  CHECK(told > 63 * static_cast<int>(deaths) / 3, told);
  CHECK_EQ(Die(256, 0), 255);
  if (check::Times(1, 0)) CHECK_EQ(Die(1024, 0), 1023);
}

TEST(LateRankIsNamed) {
  Simulation sim(3, 0);
  Exchange first(&sim), second(&sim);
  first.Begin(Of("first", {}));
  first.Run();
  for (int rank : {0, 2}) second.Begin(rank, Of("second", {}));
  CHECK(sim.RunUntil([&] { return second.pending[0]->over(); }));
  CheckHas(second.Error(0), "s for 1 of 3 processes. Arrived: ranks 0, 2. Missing: rank 1, which "
                            "runs, but is in no exchange; its latest was layer 'first'.");
}

// Both ranks have begun and say so. One dies after its answer, or both live.
TEST(PartsThatDoNotArrive) {
  for (const bool dies : {true, false}) {
    Simulation sim(2, 0);
    sim.loses_parts = true;
    sim.After(kTimeout * 3 / 4, [&] { sim.ranks[1].dead = dies; });
    Exchange exchange(&sim);
    exchange.Begin(Of("norm", ToBytes<double>({1})));
    exchange.Run();
    CheckHas(exchange.Error(0), "layer 'norm': waited 1.5");
    CheckHas(exchange.Error(0), dies ? "Missing: rank 1, which does not answer: it has died"
                                     : " s for parts that do not arrive, though all 2 processes "
                                       "have begun");
  }
}

TEST(JoinWithoutTheDead) {
  Simulation sim(3, 0);
  sim.ranks[1].dead = true;
  const Protocol& protocol = *sim.ranks[0].protocol;
  for (int rank : {0, 2}) sim.ranks[rank].protocol->Join(0.2, sim.now());
  CHECK(sim.RunUntil([&] { return !protocol.joining().active(); }));
  CheckHas(ErrorOf([&] { protocol.joining().Result(); }), "rank 1 did not answer");
}

// Before MPI ends, all ranks wait for each other to leave, but not for a dead one.
TEST(Leaving) {
  for (const bool dies : {false, true}) {
    Simulation sim(8, 0);
    sim.ranks[5].dead = dies;
    for (int rank = 0; rank < sim.size(); ++rank) {
      Protocol* const protocol = sim.ranks[rank].protocol.get();
      if (sim.ranks[rank].dead) continue;
      sim.After(std::chrono::minutes(rank), [=] {
        protocol->Leave();
        protocol->leaving().Await();
      });
    }
    for (int rank = 0; rank < sim.size(); ++rank) {
      const syncbn::Leaving& leaving = sim.ranks[rank].protocol->leaving();
      if (sim.ranks[rank].dead) continue;
      CHECK(sim.RunUntil([&] { return leaving.Complete() || leaving.HasUnresponsive(); }));
      CHECK_EQ(leaving.Complete(), !dies);
    }
  }
}

// ---- failures ----------------------------------------------------------------------------------

// The errors of ranks with these contributions. They begin at once, but the last one may be late.
std::vector<std::string> Errors(const std::vector<Contribution>& own, microseconds late = {}) {
  Simulation sim(static_cast<int>(own.size()), 0);
  Exchange exchange(&sim);
  const int last = sim.size() - 1;
  for (int rank = 0; rank < last; ++rank) exchange.Begin(rank, own[rank]);
  sim.After(late, [&] { exchange.Begin(last, own[last]); });
  exchange.Run();
  std::vector<std::string> errors;
  for (const auto& pending : exchange.pending) errors.push_back(pending->error);
  return errors;
}

TEST(OtherLayersAreBothNamed) {
  for (const std::string& error : Errors({Of("norm0", {}), Of("norm1", {})})) {
    for (const char* name : {"layer 'norm0'", "layer 'norm1'", "which waits in layer 'norm"}) {
      CheckHas(error, name);
    }
  }
}

TEST(SignaturesThatDiffer) {
  for (int odd = 0; odd < 3; ++odd) {
    std::vector<Contribution> own(3, Of("norm", {}));
    own[odd].signature = "channels=2";
    for (const std::string& error : Errors(own)) {
      for (const char* part :
           {"layer 'norm': ", "processes disagree: rank ", "has channels=1", "has channels=2"}) {
        CheckHas(error, part);
      }
    }
  }
}

// Rank 2 begins while the others exchange their parts, or after they have.
TEST(RanksThatDiffer) {
  std::vector<Contribution> own(3, Of("norm", {}));
  own[0].ranks = own[1].ranks = {0, 1};
  for (const microseconds late : {microseconds(0), microseconds(1000)}) {
    const std::string error = Errors(own, late)[2];
    CheckHas(error, "(synchronized: ranks 0, 1)");
    CheckHas(error, "rank 2 has channels=1 (synchronized: ranks 0, 1, 2)");
  }
}

// Only rank 1 recovers from each of several failures; the others are told of all and recover once.
TEST(OneRecoveryMakesUpForSeveral) {
  Simulation sim(3, 0);
  Protocol* const often = sim.ranks[1].protocol.get();
  for (int failure = 0; failure < 5; ++failure) {
    often->Fail("the ship sinks");
    often->Reset();
  }
  CHECK(sim.RunUntil([&] { return sim.now() > Time() + milliseconds(1); }));
  for (int rank : {0, 2}) sim.ranks[rank].protocol->Reset();
  Exchange exchange(&sim);
  exchange.Begin(Of("norm", ToBytes<double>({2})));
  exchange.Run();
  CHECK(exchange.pending[0]->Result() == ToBytes<double>({6}));
  CheckIdle(sim);
}

}  // namespace

int main() { return check::RunTests(); }
