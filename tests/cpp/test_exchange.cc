// Tests exchanges between threads with random delays, and failures in one process.
#include <sys/prctl.h>

#include <atomic>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/program.h"
#include "ranks.h"

namespace {

using syncbn::Contribution;
using syncbn::Device;
using syncbn::Numbers;
using syncbn::Phase;
using syncbn::Ticket;
using syncbn::Time;
using syncbn::Waiting;

Device Cpu(int id) { return {"cpu", id}; }

// ---- threads -----------------------------------------------------------------------------------

// Each device of each layer and rank has a thread, which is late now and then. The net moves to
// other devices, and returns after a reset. Then rank 0 fails, and all waits end.
void Train(int num_ranks, int size) {
  constexpr int kLayers = 2;
  // The steps of several ranks are slow if other programs keep the processors busy.
  const int steps = num_ranks == 1 ? check::Rounds(4000, 400) : check::Rounds(100, 100);
  const auto network = std::make_shared<Network>(num_ranks);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int i = 0; i < num_ranks; ++i) ranks.push_back(std::make_unique<Rank>(network, i));
  for (const int first : {0, 8, 16, 0}) {
    if (first == 0) {  // only a reset lets a net return to former devices
      for (const auto& rank : ranks) rank->Reset();
    }
    Parallel(num_ranks * kLayers * size, [&](int thread) {
      const int rank_here = thread / size / kLayers, layer = thread / size % kLayers;
      const int id = first + thread % size;
      std::mt19937 delays(thread);
      Ticket ticket;
      for (int step = 0; step < 2 * steps; ++step) {
        if (delays() % 4000 == 0) std::this_thread::sleep_for(std::chrono::microseconds(250));
        // Another exchange, or another order of ranks and devices, gives another sum.
        const auto number = [&](int rank, int device) {
          return 1.0 / (2 * step + layer + 7 * device + 11 * rank + 1);
        };
        double expected = 0;
        for (int rank = 0; rank < num_ranks; ++rank) {
          double sum = number(rank, first);
          for (int i = 1; i < size; ++i) sum += number(rank, first + i);
          expected += sum;
        }
        Contribution own =
            ContributionOf(&ranks[rank_here]->layers[layer], id, number(rank_here, id));
        own.phase = step % 2 == 0 ? Phase::kForward : Phase::kBackward;
        own.devices = size;
        const Numbers sum = ranks[rank_here]->Contribute(std::move(own), &ticket);
        CHECK_EQ(sum[0], expected, "step ", step);
      }
    });
  }
  Parallel(num_ranks * kLayers, [&](int thread) {  // the other devices never call
    const std::string text = ErrorOf([&] {
      Rank* const rank = ranks[thread / kLayers].get();
      Contribution own = ContributionOf(&rank->layers[thread % kLayers]);
      own.devices = size;
      Ticket ticket;
      if (thread == 0) rank->Fail("the ship sinks", true);
      rank->Contribute(std::move(own), &ticket);
    });
    CheckHas(text, "the ship sinks");
  });
  Parallel(num_ranks, [&](int rank) {
    // A table can be used while it waits for other ranks to leave.
    while (rank > 0 && !ranks[rank - 1]->HasLeft()) std::this_thread::yield();
    CHECK(ranks[rank]->Disconnect(10, 10));
  });
}

TEST(RandomThreads) {
  for (const int size : {2, 5, 8}) Train(1, size);
  for (const int ranks : {2, 4}) Train(ranks, 2);
}

TEST(APauseRestoresTheTimerSlack) {
  constexpr int kSlack = 2000;
  prctl(PR_SET_TIMERSLACK, kSlack);
  { syncbn::Pause never_paused(true); }
  CHECK_EQ(prctl(PR_GET_TIMERSLACK), kSlack);
  {
    std::mutex mutex;
    std::unique_lock<std::mutex> lock(mutex);
    std::condition_variable changed;
    const std::atomic<bool> over{false};
    syncbn::Pause pause(true);
    while (prctl(PR_GET_TIMERSLACK) == kSlack) pause(&lock, over, &changed, Time());
  }
  CHECK_EQ(prctl(PR_GET_TIMERSLACK), kSlack);
}

// ---- failures ----------------------------------------------------------------------------------

// The only rank of a program. Its layers are on `size` devices, which contribute one number each.
struct OneRank : Rank {
  explicit OneRank(size_t devices) : Rank(std::make_shared<Network>(1), 0), size(devices) {}

  Contribution ContributionOf(int id, double number = 0, Phase phase = Phase::kForward) {
    Contribution own = ::ContributionOf(&layers[0], id, number);
    own.phase = phase;
    own.devices = size;
    return own;
  }

  // A device arrives and does not wait.
  Waiting Arrive(Contribution own, Ticket* ticket = nullptr) {
    Ticket scratch;
    return Rank::Arrive(std::move(own), ticket == nullptr ? &scratch : ticket, Time());
  }
  void Call(const std::vector<int>& ids, Ticket* tickets = nullptr) {
    for (const int id : ids)
      Arrive(ContributionOf(id), tickets == nullptr ? nullptr : &tickets[id]);
  }

  const size_t size;
};

std::atomic<int> located{0};

// A long wait prints once what it waits for, and again after a reset. Both look for the program's
// lines.
TEST(NoticeOfALongWait) {
  OneRank rank(2);
  syncbn::SetLocator([] { ++located; });
  for (int reset = 0; reset < 2; ++reset) {
    for (int layer = 0; layer < 2; ++layer) {
      Contribution own = rank.ContributionOf(0);
      own.members = &rank.layers[layer];
      const Waiting waiting = rank.Arrive(own);
      CHECK(!rank.IsOver(waiting, Time(std::chrono::seconds(9))));
      CHECK_EQ(located.load(), reset + layer);
      CHECK(!rank.IsOver(waiting, Time(std::chrono::seconds(11))));
      CHECK_EQ(located.load(), reset + 1);
    }
    rank.Fail("the ship sinks", false);
    rank.Reset();
  }
  syncbn::SetLocator(nullptr);
}

// A thread that forks may hold what the locator waits for.
TEST(ForkThatBeginsWhileTheLocatorRuns) {
  static std::atomic<bool> runs, ends;
  runs = ends = false;
  syncbn::SetLocator([] {
    for (runs = true; !ends;) std::this_thread::yield();
  });
  std::thread waits([] { CHECK_EQ(syncbn::WhereProgramStands(), ""); });
  while (!runs) std::this_thread::yield();
  syncbn::BeginFork();
  waits.join();
  ends = true;
  syncbn::EndFork();
  syncbn::SetLocator([] { syncbn::ReportWhere("here"); });
  CHECK_EQ(syncbn::WhereProgramStands(), "here");
  syncbn::SetLocator(nullptr);
}

TEST(TimesOfWaits) {
  OneRank rank(2);
  CHECK_EQ(rank.LongestWait(), 0.0);
  std::thread waits(
      [&] { rank.Contribute(rank.ContributionOf(0), std::make_unique<Ticket>().get()); });
  while (rank.LongestWait() < 0.01) std::this_thread::yield();
  Ticket ticket;
  rank.Contribute(rank.ContributionOf(1), &ticket);
  waits.join();
  CHECK(rank.WaitSeconds(rank.layers[0], Cpu(0)) >= 0.01);
  CHECK_EQ(rank.WaitSeconds(rank.layers[0], Cpu(1)), 0.0);
  CHECK_EQ(rank.LongestWait(), 0.0);
  CHECK_EQ(rank.Status().find(" took "), std::string::npos, "a history that nobody asked for");
  rank.Arrive(rank.ContributionOf(0));
  rank.Fail("the ship sinks", false);
  CHECK_EQ(rank.LongestWait(), 0.0);
}

// Nothing in such a process would end the failure.
TEST(AProcessWithoutLayersStoresNoFailure) {
  syncbn::Table table;
  table.Fail("the ship sinks", false);
  CHECK_EQ(table.Failure(), "");
}

TEST(ALaterCallNamesItsDeviceAndTheFailure) {
  OneRank rank(2);
  rank.Fail("the ship sinks", false);
  CheckHas(ErrorOf([&] { rank.Arrive(rank.ContributionOf(1)); }),
           "cpu(1) stopped because of an earlier error: the ship sinks");
}

// After Restart a layer may be called on former devices.
TEST(RestartForgetsDevices) {
  OneRank rank(1);
  rank.Call({0, 1});
  rank.Restart(&rank.layers[0]);
  rank.Call({0});
}

// The first failure ends the calls of all layers of the process.
TEST(TimeoutNamesWhoIsMissing) {
  OneRank rank(3);
  Ticket tickets[3];
  rank.Call({0, 1, 2}, tickets);
  Contribution other = rank.ContributionOf(1);
  other.members = &rank.layers[1];
  const Waiting other_waiting = rank.Arrive(other), waiting = rank.Arrive(rank.ContributionOf(0));
  rank.Call({2});
  CHECK(!rank.IsOver(waiting, Time(std::chrono::seconds(59))));
  CHECK(rank.IsOver(waiting, Time(std::chrono::seconds(60))));
  const std::string text = rank.Failure();
  CheckHas(text, "SyncBatchNorm 'all', forward: waited 60 s for 1 of 3 devices");
  CheckHas(text, "Arrived: cpu(0) with shape (0), cpu(2) with shape (2). Missing: cpu(1).");
  CHECK_EQ(other_waiting.exchange->error, "SyncBatchNorm 'some', forward: " + text);
  rank.Fail("a later failure", false);
  CHECK_EQ(rank.Failure(), text);
  rank.Reset();
  CheckHas(ErrorOf([&] { rank.Arrive(rank.ContributionOf(1, 0, Phase::kBackward), &tickets[1]); }),
           "recover() or a conversion of the net has invalidated the forward call on cpu(1)");
}

TEST(ContributionsThatDoNotFitTogether) {
  const char* const errors[] = {"epsilon=0, num_devices=2, but cpu(1) has channels=2",
                                "epsilon=0, num_devices=2, but cpu(1) has channels=1",
                                "forward: all devices and ranks must contribute 1 numbers"};
  for (int fault = 0; fault < 3; ++fault) {
    OneRank rank(2);
    Contribution second = rank.ContributionOf(1);
    if (fault == 0) second.signature.channels = 2;
    if (fault == 1) second.devices = 3;
    if (fault == 2) second.numbers = Numbers(2);
    const Waiting waiting = rank.Arrive(rank.ContributionOf(0));
    const std::string text = ErrorOf([&] { rank.Arrive(second); });
    CHECK_EQ(waiting.exchange->error, text);
    CheckHas(text, errors[fault]);
  }
}

// ---- other devices than before -----------------------------------------------------------------

// The caller expects other devices, like a traced graph whose parameters have moved.
TEST(AnotherDeviceThanExpected) {
  OneRank rank(2);
  Contribution own = rank.ContributionOf(2);
  const std::set<Device> expected{Cpu(0), Cpu(1)};
  own.expected = &expected;
  CHECK(rank.IsOver(rank.Arrive(own), Time(std::chrono::seconds(60))));
  CheckHas(rank.Failure(),
           "num_devices=2, but the layer is called on cpu(2) as well as on cpu(0), cpu(1)");
}

// A call of a third device looks as if the net had moved, until an old device calls again. The
// numbers of the two must not be reduced together.
TEST(MoreDevicesThanTheLayerHas) {
  for (const Phase phase : {Phase::kForward, Phase::kBackward}) {
    OneRank rank(2);
    Ticket tickets[3];
    rank.Call({0, 1}, tickets);
    const Waiting third = rank.Arrive(rank.ContributionOf(2));
    CheckHas(ErrorOf([&] { rank.Arrive(rank.ContributionOf(0, 0, phase), &tickets[0]); }),
             "num_devices=2, but the layer is called on cpu(0) as well as on cpu(2)");
    CHECK(third.exchange->over);
  }
  OneRank rank(2);
  rank.Call({0, 1, 0});
  CheckHas(ErrorOf([&] { rank.Call({2}); }), "num_devices=2, but the layer is called on cpu(2)");
}

// A call with fewer devices than the layer has, and a backward after a call with all.
TEST(FewerDevicesThanTheLayerHas) {
  OneRank rank(3);
  Ticket tickets[3];
  const auto call = [&](int id, Phase phase) {
    Contribution own = rank.ContributionOf(id, 10 * id, phase);
    own.devices = 2;
    return rank.Arrive(std::move(own), &tickets[id]);
  };
  for (const int id : {0, 2}) call(id, Phase::kForward);
  rank.Call({0, 1});
  call(0, Phase::kBackward);
  CHECK(call(2, Phase::kBackward).exchange->result == Numbers{20});
  CHECK(rank.Arrive(rank.ContributionOf(2)).exchange->over);
}

}  // namespace

int main() { return check::RunTests(); }
