// Tests communicators without MPI; a process is a thread here: order, messages of errors, waits
// that end, joining, leaving, and many rounds. test_many_ranks.cc and test_soak.cc have the
// protocol, in simulated time.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collective/processes/communicator.h"
#include "collective/devices/group.h"
#include "errors.h"
#include "local_transport.h"

namespace {

using syncbn::Bytes;
using syncbn::Communicator;
using syncbn::Contribution;
using syncbn::ToBytes;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kStressRounds = 300;
#else
constexpr int kStressRounds = 3000;
#endif

// `function(communicator)` on each rank, in a thread of its own.
void Run(int size, const std::function<void(Communicator*)>& function,
         std::shared_ptr<Network> network = nullptr) {
  if (!network) network = std::make_shared<Network>(size);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    auto transport = std::make_unique<LocalTransport>(network, rank);
    ranks.push_back(std::make_unique<Communicator>(std::move(transport)));
  }
  Parallel(size, [&](int rank) { function(ranks[rank].get()); });
}

double First(const Bytes& bytes) {
  double value = -1;
  if (bytes.size() >= sizeof(value)) std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

Contribution Number(const std::string& key, double number, double timeout = 60) {
  Contribution contribution;
  contribution.key = key;
  contribution.title = "layer '" + key + "'";
  contribution.signature = "channels=1";
  contribution.operation = syncbn::ReduceOperation::kSumFloat64;
  contribution.timeout_seconds = timeout;
  contribution.payload = ToBytes(std::vector<double>{number});
  return contribution;
}

double Sum(Communicator* rank, const std::string& key, double number, double timeout = 60) {
  return First(rank->AllReduce(Number(key, number, timeout)));
}

// ---- numbers -----------------------------------------------------------------------------------

// Each rank is late in turn. Concatenation shows the order of ranks, and that each took part once.
TEST(PartsAreReducedInTheOrderOfRanks) {
  for (int size : {1, 2, 3, 4, 5, 6, 7, 8, 13}) {
    Run(size, [&](Communicator* rank) {
      std::string expected;
      for (int i = 0; i < size; ++i) expected += std::string(1, static_cast<char>('a' + i));
      for (int late = 0; late < std::min(size, 4); ++late) {
        if (rank->rank() == late) Sleep(3);
        Contribution mine = Number("late" + std::to_string(late), 0);
        mine.operation = syncbn::ReduceOperation::kConcat;
        mine.payload = {static_cast<char>('a' + rank->rank())};
        const Bytes all = rank->AllReduce(mine);
        CHECK_EQ(std::string(all.begin(), all.end()), expected);
      }
    });
  }
}

TEST(SomeRanksOnly) {
  Run(5, [](Communicator* rank) {
    const bool odd = rank->rank() % 2 == 1;
    Contribution mine = Number("half", rank->rank());
    mine.ranks = odd ? std::vector<int>{1, 3} : std::vector<int>{0, 2, 4};
    CHECK_EQ(First(rank->AllReduce(mine)), odd ? 4.0 : 6.0);
  });
}

// ---- failures ----------------------------------------------------------------------------------

TEST(MissingRankIsNamed) {
  std::string texts[3];
  Run(3, [&](Communicator* rank) {
    Sum(rank, "first", 1);
    if (rank->rank() == 1) Sleep(800);  // it computes
    texts[rank->rank()] = ErrorOf([&] { Sum(rank, "second", 1, 0.3); });
  });
  for (const std::string& text : texts) {
    CheckHas(text, "layer 'second': ");
    CheckHas(text, "waited 0.");
    CheckHas(text, "s for 1 of 3 processes. Arrived: ranks 0, 2. Missing: rank 1, which runs, but "
                   "is in no exchange; its latest was layer 'first'.");
  }
  CheckHas(texts[1], "error on rank ");
}

// Loses parts, and nothing else. Rank 1 is dead from its `answers`-th answer on.
std::shared_ptr<Network> WithoutParts(int answers) {
  auto network = std::make_shared<Network>(2);
  Network* const self = network.get();
  network->loses = [self, answers](int from, int, const Bytes& bytes) mutable {
    const syncbn::MessageKind kind = syncbn::Decode(bytes).kind;
    if (from == 1 && kind == syncbn::MessageKind::kStatus && --answers == 0) self->dead[1] = true;
    return kind == syncbn::MessageKind::kPart;
  };
  return network;
}

// Both have begun and say so; one of them is stopped before its part has arrived.
TEST(RankThatStopsAfterItsAnswerIsNamed) {
  Run(2, [&](Communicator* rank) {
    const std::string text = ErrorOf([&] { Sum(rank, "norm", 1, 0.4); });
    if (rank->rank() == 0) CheckHas(text, "Missing: rank 1, which does not answer: it has died");
  }, WithoutParts(1));
}

// Both live and say that they have begun, but nothing arrives.
TEST(LostPartsEndInAnError) {
  Run(2, [&](Communicator* rank) {
    const std::string text = ErrorOf([&] { Sum(rank, "norm", 1, 0.4); });
    CheckHas(text, "layer 'norm': ");
    CheckHas(text, "s for parts that do not arrive, though all 2 processes have begun");
  }, WithoutParts(0));
}

// A process fails, recovers and leaves without waiting for an exchange that waits.
TEST(CallsGetThroughAWait) {
  for (const bool leaves : {false, true}) {
    Run(2, [&](Communicator* rank) {
      std::thread waiting([=] {
        const std::string text = ErrorOf([&] { Sum(rank, "norm", 1); });
        CheckHas(text, leaves ? "layer 'norm': " : "the ship sinks");
      });
      Sleep(50);
      if (leaves) {
        rank->Leave();
      } else {
        rank->Fail("the ship sinks");
      }
      waiting.join();
      if (leaves) return;
      rank->Reset();
      CHECK_EQ(rank->Failure(), "");
    }, WithoutParts(0));
  }
}

TEST(OtherLayersAreBothNamed) {
  Run(2, [](Communicator* rank) {
    const std::string mine = rank->rank() == 0 ? "norm0" : "norm1";
    const std::string text = ErrorOf([&] { Sum(rank, mine, 1, 0.2); });
    CheckHas(text, "layer 'norm0'");
    CheckHas(text, "layer 'norm1'");
    CheckHas(text, "which waits in layer 'norm");
  });
}

TEST(SignaturesThatDiffer) {
  for (int odd = 0; odd < 3; ++odd) {
    Run(3, [&](Communicator* rank) {
      Contribution mine = Number("norm", 1);
      if (rank->rank() == odd) mine.signature = "channels=2";
      const std::string text = ErrorOf([&] { rank->AllReduce(mine); });
      CheckHas(text, "layer 'norm': ");
      CheckHas(text, "processes disagree: rank ");
      CheckHas(text, "has channels=1");
      CheckHas(text, "has channels=2");
    });
  }
}

TEST(GroupsThatDiffer) {
  Run(3, [](Communicator* rank) {
    Contribution mine = Number("norm", 1);
    if (rank->rank() < 2) mine.ranks = {0, 1};
    const std::string text = ErrorOf([&] { rank->AllReduce(mine); });
    if (rank->rank() < 2 && text == kNoError) return;  // they were complete before
    CheckHas(text, "(synchronized: ranks 0, 1)");
    CheckHas(text, "rank 2 has channels=1 (synchronized: ranks 0, 1, 2)");
  });
}

// Only rank 1 recovers from each of several failures; the others are told of all and recover once.
TEST(OneRecoveryMakesUpForSeveral) {
  Run(3, [](Communicator* rank) {
    Sum(rank, "norm", 1);
    if (rank->rank() == 1) {
      for (int failure = 0; failure < 5; ++failure) {
        rank->Fail("the ship sinks");
        rank->Reset();
      }
    } else {
      while (rank->Failure().empty()) Sleep(1);
      Sleep(50);
      rank->Reset();
    }
    CHECK_EQ(Sum(rank, "norm", 2), 6);
  });
}

TEST(LeaverEndsTheWaitOfOthers) {
  std::atomic<int> told{0};
  Run(4, [&](Communicator* rank) {
    Sum(rank, "norm", 1);
    if (rank->rank() == 3) {
      rank->Leave();
      CheckHas(ErrorOf([&] { Sum(rank, "norm2", 1); }), "called after");
    } else {
      CheckHas(ErrorOf([&] { Sum(rank, "norm2", 1); }), "rank 3 has left");
      // A message of a rank that leaves now could overtake that of rank 3, whose name is expected.
      for (++told; told < 3;) Sleep(1);
      rank->Leave();
    }
    CHECK(rank->AwaitLeave(10));
  });
}

// ---- joining -----------------------------------------------------------------------------------

// Rank r has r + 1 batches; a rank without more contributes nothing.
TEST(Join) {
  for (int size : {2, 3, 4, 5}) {
    Run(size, [&](Communicator* rank) {
      for (int epoch = 0; epoch < 3; ++epoch) {
        const int batches = (rank->rank() + epoch) % size + 1;
        for (int batch = 0; batch < batches; ++batch) {
          const int64_t number = rank->NextNumber("step");
          CHECK_EQ(number, batch);
          CHECK_EQ(Sum(rank, "step" + std::to_string(number), 1), size - batch);
        }
        const int last = rank->Join(30);
        CHECK_EQ((last + epoch) % size + 1, size);
      }
    });
  }
}

TEST(JoinWithoutTheDead) {
  auto network = std::make_shared<Network>(3);
  Run(3, [&](Communicator* rank) {
    if (rank->rank() == 1) {
      network->dead[1] = true;
      return;
    }
    CheckHas(ErrorOf([&] { rank->Join(0.2); }), "rank 1 did not answer");
  }, network);
}

// ---- with devices ------------------------------------------------------------------------------

// `device` arrives with a number at a rendezvous of `devices` devices and all ranks.
syncbn::AllReduceOptions Arrive(Communicator* rank, const syncbn::Ticket& ticket,
                                const std::string& phase, const syncbn::Device& device,
                                int devices, double number) {
  syncbn::AllReduceOptions options;
  options.ticket = ticket;
  options.phase = phase;
  options.device = device;
  options.arrival = {"same", "", ToBytes<double>({number})};
  options.size = static_cast<size_t>(devices);
  options.timeout_seconds = 60;
  options.across = {rank, {}, "norm#1", "same"};
  return options;
}

// A layer on `devices` threads of each rank, in groups of their own.
TEST(GroupMakesOneExchange) {
  Run(3, [](Communicator* rank) {
    const int devices = rank->rank() + 1;
    syncbn::Group group("norm");
    Parallel(devices, [&](int id) {
      const syncbn::Device device{"cpu", id};
      for (int step = 0; step < 50; ++step) {
        const auto ticket = group.BeginForward(device, devices);
        for (const char* phase : {"forward", "backward"}) {
          CHECK_EQ(First(*group.AllReduce(Arrive(rank, ticket, phase, device, devices, 1 + step))),
                   6.0 * (1 + step));
        }
      }
    });
  });
}

TEST(FailureOfADeviceReachesOtherRanks) {
  Run(2, [](Communicator* rank) {
    syncbn::Group group("norm");
    const syncbn::Device device{"cpu", 0};
    const int devices = rank->rank() == 0 ? 2 : 1;  // the second never arrives
    const auto ticket = group.BeginForward(device, devices);
    auto options = Arrive(rank, ticket, "forward", device, devices, 1);
    if (rank->rank() == 0) options.timeout_seconds = 0.2;
    const std::string text = ErrorOf([&] { group.AllReduce(options); });
    CheckHas(text, "s for 1 of 2 devices");
    if (rank->rank() == 1) CheckHas(text, "error on rank 0");
  });
}

// ---- stress ------------------------------------------------------------------------------------

void Stress(int size) {
  Run(size, [&](Communicator* rank) {
    Parallel(2, [&](int branch) {
      std::mt19937 random(2 * rank->rank() + branch);
      for (int step = 0; step < kStressRounds / size; ++step) {
        if (random() % 200 == 0) Sleep(1);
        const std::string key = std::to_string(branch) + "|" + std::to_string(step);
        CHECK_EQ(Sum(rank, key, step + rank->rank()), size * step + size * (size - 1) / 2.0);
      }
    });
  });
}

TEST(StressOfSeveralSizes) {
  for (int size : {2, 3, 6, 64}) Stress(size);
}

}  // namespace

int main() { return check::RunTests(); }
