// Tests exchanges of hundreds of simulated ranks: the same bits in every order; late and dead
// ranks. `--count` prints the messages and rounds of an exchange, which test_native.py compares
// with the model of benchmark_exchange.py. test_soak.cc has ranks that join, and connections that
// break.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <numeric>
#include <string>
#include <vector>

#include "check.h"
#include "simulation.h"

namespace {

using simulation::FromBytes;
using simulation::kTick;
using simulation::microseconds;
using simulation::milliseconds;
using simulation::Protocol;
using simulation::Simulation;
using simulation::Time;
using simulation::ToBytes;
using syncbn::Bytes;
using syncbn::Contribution;
using syncbn::ReduceOperation;

constexpr milliseconds kTimeout{1000};
constexpr std::chrono::hours kLimit{1};

Contribution Of(const std::string& key, Bytes payload,
                ReduceOperation operation = ReduceOperation::kSumFloat64) {
  Contribution contribution;
  contribution.key = key;
  contribution.title = "layer '" + key + "'";
  contribution.signature = "channels=1";
  contribution.operation = operation;
  contribution.timeout_seconds = 1e-3 * kTimeout.count();
  contribution.payload = std::move(payload);
  return contribution;
}

// One exchange of all ranks.
struct Exchange {
  void Begin(Simulation* sim, int rank, Contribution contribution) {
    begun[rank] = sim->now();
    pending[rank] = sim->ranks[rank].protocol->Begin(std::move(contribution), sim->now());
  }
  bool Over(const Simulation& sim) {
    while (over < pending.size() &&
           (sim.ranks[over].dead || (pending[over] && pending[over]->over()))) {
      ++over;
    }
    return over == pending.size();
  }
  std::vector<std::shared_ptr<syncbn::PendingExchange>> pending;
  std::vector<Time> begun;
  size_t over = 0;  // of the first ranks
};

Exchange Of(const Simulation& sim) {
  const size_t size = sim.ranks.size();
  return {std::vector<std::shared_ptr<syncbn::PendingExchange>>(size), std::vector<Time>(size), 0};
}

// ---- what an exchange costs --------------------------------------------------------------------

struct Cost {
  int64_t rounds, messages;
};

// The cost where all begin at once and a message takes a unit of time.
Cost CostOf(int size) {
  Simulation sim(size, 0);
  Exchange exchange = Of(sim);
  for (int rank = 0; rank < size; ++rank) {
    exchange.Begin(&sim, rank, Of("norm", ToBytes<double>({1})));
  }
  CHECK(sim.RunUntil([&] { return exchange.Over(sim); }, kLimit));
  for (const auto& pending : exchange.pending) {
    CHECK(pending->Result() == ToBytes<double>({double(size)}));
  }
  for (const auto& rank : sim.ranks) CHECK(rank.protocol->Idle());
  CHECK_EQ(sim.queries, 0);
  return {(sim.now() - Time()) / sim.delay(), sim.parts};
}

// ---- numbers -----------------------------------------------------------------------------------

// The results of three exchanges in flight at once, which each rank begins in an order and at times
// of its own. Payloads do not depend on the seed.
std::vector<Bytes> Shuffled(int size, uint32_t seed) {
  Simulation sim(size, seed);
  sim.delay = simulation::RandomDelay(&sim);
  std::vector<Exchange> exchanges(3, Of(sim));
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
      sim.After(late, [&sim, &exchanges, rank, i, contribution = own[i]] {
        exchanges[i].Begin(&sim, rank, contribution);
      });
    }
  }
  std::vector<Bytes> results;
  for (Exchange& exchange : exchanges) {
    CHECK(sim.RunUntil([&] { return exchange.Over(sim); }, kLimit), size, " ranks, seed ", seed);
    results.push_back(exchange.pending[0]->Result());
    for (int rank = 1; rank < size; ++rank) {
      CHECK(exchange.pending[rank]->Result() == results.back());
    }
  }
  for (const auto& rank : sim.ranks) CHECK(rank.protocol->Idle());
  return results;
}

void TestSameBitsInEveryOrder() {
  for (int size : {64, 100, 256, 1024}) {
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
  sim.delay = simulation::RandomDelay(&sim);
  Exchange exchange = Of(sim);
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
      try {
        exchange.Begin(&sim, rank, Of("norm", ToBytes<double>({1})));
      } catch (const syncbn::Error&) {  // it was told before it began
        exchange.pending[rank] = std::make_shared<syncbn::PendingExchange>();
        exchange.pending[rank]->error = sim.ranks[rank].protocol->failure();
      }
      sim.Resume(rank);
    });
  }
  const auto over = [&] { return death <= sim.now() && exchange.Over(sim); };
  CHECK(sim.RunUntil(over, kLimit), size, " ranks, seed ", seed);
  // The others ask after half of the timeout: a late rank may have answered before it died.
  const bool answered = dead == late && death > Time() + kTimeout / 2;
  int told = 0;
  for (int rank = 0; rank < size; ++rank) {
    if (rank == dead || exchange.pending[rank]->error.empty()) continue;
    ++told;
    const std::string& text = exchange.pending[rank]->error;
    const std::string name =
        syncbn::Concat("rank ", dead, answered ? ", which runs, but" : ", which does not answer");
    CHECK(text.find(name) != std::string::npos, text);
    const auto waited = ended[rank] - std::max(death, exchange.begun[rank]);
    CHECK(waited <= kTimeout + 2 * kTick + milliseconds(20), "rank ", rank, ", seed ", seed, ": ",
          waited.count(), " ns");
  }
  return told;
}

void TestDeathIsReportedWithinTheTimeout() {
  int told = 0;
  const uint32_t deaths = check::Times(300, 15);
  for (uint32_t seed = 0; seed < deaths; ++seed) told += Die(64, seed);
  CHECK(told > 63 * static_cast<int>(deaths) / 3, told);
  CHECK_EQ(Die(256, 0), 255);
  if (check::Times(1, 0)) CHECK_EQ(Die(1024, 0), 1023);
}

// Before MPI ends, all ranks wait for each other to leave, but not for a dead one.
void TestLeaving() {
  for (const bool dies : {false, true}) {
    Simulation sim(8, 0);
    sim.ranks[5].dead = dies;
    for (int rank = 0; rank < sim.size(); ++rank) {
      Protocol* const protocol = sim.ranks[rank].protocol.get();
      if (sim.ranks[rank].dead) continue;
      sim.After(std::chrono::minutes(rank), [=] {
        protocol->Leave();
        CHECK(protocol->leaving().clean());
        protocol->leaving().Await();
      });
    }
    for (int rank = 0; rank < sim.size(); ++rank) {
      const syncbn::Leaving& leaving = sim.ranks[rank].protocol->leaving();
      if (sim.ranks[rank].dead) continue;
      const auto over = [&] { return leaving.Complete() || leaving.HasUnresponsive(); };
      CHECK(sim.RunUntil(over, kLimit));
      CHECK_EQ(leaving.Complete(), !dies);
    }
  }
}

}  // namespace

int main(int, char** arguments) {
  if (arguments[1] != nullptr) {
    for (int size : {1, 2, 3, 5, 6, 7, 8, 64, 96, 97, 100, 256, 1000, 1024}) {
      const Cost cost = CostOf(size);
      std::cout << size << " " << cost.rounds << " " << cost.messages << "\n";
    }
    return check::Result();
  }
  TestSameBitsInEveryOrder();
  TestDeathIsReportedWithinTheTimeout();
  TestLeaving();
  return check::Result();
}
