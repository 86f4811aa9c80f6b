// Tests groups: numbers, order, failures, resets, and many rendezvous under random delays. A device
// is a thread here. A lost wake-up ends in a timeout, of the group or of ctest.
#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collective/common/timeout.h"
#include "collective/devices/group.h"
#include "collective/devices/registry.h"
#include "errors.h"

namespace {

using syncbn::AllReduceOptions;
using syncbn::Device;
using syncbn::Group;
using syncbn::ReduceOperation;
using syncbn::Ticket;
using syncbn::ToBytes;
using Numbers = std::vector<double>;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kStressRounds = 5000;
#else
constexpr int kStressRounds = 100000;
#endif

Device Cpu(int id) { return {"cpu", id}; }

// A rendezvous of `size` devices to which device `id` contributes one number.
AllReduceOptions Of(const Ticket& ticket, const std::string& phase, int id, size_t size,
                    double number) {
  AllReduceOptions options;
  options.ticket = ticket;
  options.phase = phase;
  options.device = Cpu(id);
  options.arrival = {"same", "(" + std::to_string(id) + ")", ToBytes<double>({number})};
  options.size = size;
  options.timeout_seconds = 60;
  return options;
}

double Sum(Group* group, AllReduceOptions options) {
  return syncbn::FromBytes<double>(*group->AllReduce(std::move(options)))[0];
}

double Sum(Group* group, const Ticket& ticket, const std::string& phase, int id, size_t size,
           double number) {
  return Sum(group, Of(ticket, phase, id, size, number));
}

double Forward(Group* group, int id, size_t size, double number, double timeout = 60,
               const std::string& signature = "same") {
  AllReduceOptions options =
      Of(group->BeginForward(Cpu(id), size), "forward", id, size, number);
  options.timeout_seconds = timeout;
  options.arrival.signature = signature;
  return Sum(group, std::move(options));
}

// ---- numbers -----------------------------------------------------------------------------------

Numbers Reduced(ReduceOperation operation, const std::vector<Numbers>& shards) {
  syncbn::Bytes result = ToBytes(shards.front());
  for (size_t k = 1; k < shards.size(); ++k) {
    Reduce(operation, ToBytes(shards[k]), &result);
  }
  return syncbn::FromBytes<double>(result);
}

Numbers MomentsOf(const Numbers& values) {
  long double mean = 0, m2 = 0;
  for (double value : values) mean += static_cast<long double>(value) / values.size();
  for (double value : values) m2 += (value - mean) * (value - mean);
  return {double(values.size()), double(mean), double(m2)};
}

TEST(ReducedMomentsAreThoseOfTheWholeSet) {
  std::mt19937 random(1);
  std::normal_distribution<double> normal(1e4, 1);
  const std::vector<std::vector<int>> cases = {{5},       {3, 7}, {1, 1},     {0, 4},
                                               {4, 0, 2}, {0, 0}, {9, 1, 300}};
  for (const auto& sizes : cases) {
    std::vector<Numbers> shards;
    Numbers all;
    for (int size : sizes) {
      Numbers values(size);
      for (double& value : values) value = normal(random);
      shards.push_back(MomentsOf(values));
      all.insert(all.end(), values.begin(), values.end());
    }
    const Numbers expected = MomentsOf(all), reduced = Reduced(ReduceOperation::kMoments, shards);
    CHECK_EQ(reduced.at(0), expected[0]);
    CHECK_NEAR(reduced.at(1), expected[1], 1e-11);
    CHECK_NEAR(reduced.at(2), expected[2], 1e-11 * (1 + expected[2]));
  }
}

TEST(MomentsOfChannelsStayApart) {
  CHECK(Reduced(ReduceOperation::kMoments, {{2, 1, 10, 0.5, 0}, {2, 3, 10, 0.5, 8}}) ==
        Numbers({4, 2, 10, 5, 8}));
}

// Each device is the last to arrive in turn. As texts, the ids 9 and 10 would be in another order.
TEST(ResultIsInTheOrderOfDevices) {
  const std::vector<int> ids = {9, 10, 2};
  for (size_t late = 0; late < ids.size(); ++late) {
    Group group("layer");
    Parallel(3, [&](int i) {
      if (static_cast<size_t>(i) == late) Sleep(20);
      const Ticket ticket = group.BeginForward(Cpu(ids[i]), 3);
      AllReduceOptions options = Of(ticket, "forward", ids[i], 3, ids[i]);
      options.operation = ReduceOperation::kConcat;
      CHECK(*group.AllReduce(options) == ToBytes(Numbers({2, 9, 10})));
    });
  }
}

// ---- rendezvous --------------------------------------------------------------------------------

// cpu(0) begins backward with the second call, cpu(1) with the first.
TEST(TwoRendezvousCrosswise) {
  Group group("layer");
  Parallel(2, [&](int id) {
    const Ticket a = group.BeginForward(Cpu(id), 2);
    CHECK_EQ(Sum(&group, a, "forward", id, 2, 1 + id), 3);
    const Ticket b = group.BeginForward(Cpu(id), 2);
    CHECK_EQ(Sum(&group, b, "forward", id, 2, 10), 20);
    const auto backward = [&](const Ticket& ticket) {
      CHECK_EQ(Sum(&group, ticket, "backward", id, 2, 5 + ticket.number), 10 + 2 * ticket.number);
    };
    std::thread early([&] { backward(id == 0 ? a : b); });
    Sleep(5);
    backward(id == 0 ? b : a);
    early.join();
  });
}

TEST(RepeatedBackwardIsARendezvousOfItsOwn) {
  Group group("layer");
  Parallel(2, [&](int id) {
    const Ticket ticket = group.BeginForward(Cpu(id), 2);
    Sum(&group, ticket, "forward", id, 2, 0);
    for (int repeat = 0; repeat < 3; ++repeat) {
      AllReduceOptions options = Of(ticket, "backward", id, 2, repeat);
      options.repeat = repeat;
      CHECK_EQ(Sum(&group, options), 2 * repeat);
    }
  });
}

// Other processes, an exchange with which returns so many bytes.
struct Others : syncbn::ProcessGroup {
  explicit Others(size_t bytes) : bytes(bytes) {}
  int size() const override { return 2; }
  syncbn::Bytes AllReduce(syncbn::Contribution) override { return syncbn::Bytes(bytes); }
  syncbn::Generation generation() const override { return {}; }
  void Fail(const std::string&) override {}
  const size_t bytes;
};

TEST(ResultOfAnotherSizeIsAnError) {
  for (size_t bytes : {0, 7, 9, 16}) {
    Others others(bytes);
    Group group("layer");
    AllReduceOptions options = Of(group.BeginForward(Cpu(0), 1), "forward", 0, 1, 1);
    options.across = {&others, {}, "norm", "same"};
    const std::string text = ErrorOf([&] { group.AllReduce(options); });
    CheckHas(text, "SyncBatchNorm 'norm', forward: ");
    CheckHas(text, ", expected ");
  }
}

// Beyond the range of the clock.
TEST(EndlessTimeouts) {
  for (double timeout : {1e9, 9.3e9, 1e10, 1e300, std::numeric_limits<double>::infinity()}) {
    const auto years = std::chrono::hours(24 * 365 * 30);
    CHECK(syncbn::Clock::now() + syncbn::ToDuration(timeout) > syncbn::Clock::now() + years);
    Group group("layer");
    Parallel(2, [&](int id) {
      if (id == 1) Sleep(20);
      CHECK_EQ(Forward(&group, id, 2, 1, timeout), 2);
    });
  }
}

// ---- failures ----------------------------------------------------------------------------------

TEST(TimeoutNamesWhoIsMissing) {
  Group group("conv0_norm");
  Parallel(3, [&](int id) { Forward(&group, id, 3, 0); });
  std::string texts[2];
  Parallel(2, [&](int id) { texts[id] = ErrorOf([&] { Forward(&group, 2 * id, 3, 0, 0.2); }); });
  CHECK_EQ(texts[0], texts[1]);
  CheckHas(texts[0], "SyncBatchNorm 'conv0_norm', forward: waited 0.");
  CheckHas(texts[0], "Arrived: cpu(0) with shape (0), cpu(2) with shape (2). Missing: cpu(1).");
  CHECK_EQ(group.Failure(), texts[0]);
}

// The text where device 0 waits for device 1. Both have a call queued; `repeats` are later calls of
// static graphs, of which nobody knows whether they are queued.
std::string TimeoutOf(const std::string& type, bool repeats) {
  Group group("layer");
  const Device here{type, 0}, there{type, 1};
  const auto epoch = group.calls().NoteQueued(here);
  group.calls().NoteQueued(there);
  group.calls().NoteBegun(here, epoch, true);
  if (repeats) {
    group.calls().NoteBegun(there, epoch, true);
    group.calls().NoteBegun(here, epoch, false);
  }
  AllReduceOptions options = Of(group.BeginForward(here, 2), "forward", 0, 2, 1);
  options.device = here;
  options.expected = {here, there};
  options.timeout_seconds = 0.02;
  return ErrorOf([&] { group.AllReduce(options); });
}

TEST(TimeoutNamesTheCauseOfQueuedCalls) {
  for (bool repeats : {false, true}) {
    CheckHas(TimeoutOf("cpu", repeats), "Likely cause: a plain loop over CPU contexts");
  }
  CheckHas(TimeoutOf("gpu", false), "an operator in front of this layer has failed on gpu(1)");
  CheckHas(TimeoutOf("gpu", true), "the net was not called for gpu(1)");
}

TEST(LateArrivalLearnsOfTheFailure) {
  Group group("layer");
  const Ticket late = group.BeginForward(Cpu(1), 2);
  ErrorOf([&] { Forward(&group, 0, 2, 0, 0.02); });
  const std::string text = ErrorOf([&] { Sum(&group, late, "forward", 1, 2, 0); });
  CheckHas(text, "cpu(1) stopped because of an earlier error");
  CheckHas(text, "waited 0.0");
  CheckHas(ErrorOf([&] { group.BeginForward(Cpu(1), 2); }), "earlier error");
}

TEST(DisagreementPrintsBoth) {
  Group group("layer");
  std::string texts[2];
  Parallel(2, [&](int id) {
    texts[id] = ErrorOf([&] { Forward(&group, id, 2, 0, 60, id == 0 ? "red" : "blue"); });
  });
  CHECK_EQ(texts[0], texts[1]);
  CheckHas(texts[0], "red (shape (0))");
  CheckHas(texts[0], "blue (shape (1))");
}

TEST(PayloadsThatDoNotFitTogether) {
  Group group("layer");
  Parallel(2, [&](int id) {
    const Ticket ticket = group.BeginForward(Cpu(id), 2);
    AllReduceOptions options = Of(ticket, "forward", id, 2, 0);
    options.arrival.payload = ToBytes(Numbers(1 + id));
    const std::string text = ErrorOf([&] { group.AllReduce(options); });
    CheckHas(text, "SyncBatchNorm 'layer', forward: a sum of 8 bytes cannot take one of 16");
  });
}

TEST(SameDeviceTwiceInOneRendezvous) {
  Group group("layer");
  const Ticket ticket = group.BeginForward(Cpu(0), 2);
  std::string texts[2];
  Parallel(2, [&](int k) {
    texts[k] = ErrorOf([&] { Sum(&group, ticket, "forward", 0, 2, 0); });
  });
  CheckHas(texts[0] + texts[1], "arrived twice");
}

// cpu(0), which waits for a second device.
class Waiting {
 public:
  explicit Waiting(Group* group) : thread_([this, group] { Wait(group); }) {
    while (!has_begun_) std::this_thread::yield();
    Sleep(10);
  }
  // Its error.
  std::string Text() {
    thread_.join();
    return text_;
  }
  const Ticket& ticket() const { return ticket_; }

 private:
  void Wait(Group* group) {
    ticket_ = group->BeginForward(Cpu(0), 2);
    has_begun_ = true;
    text_ = ErrorOf([&] { Sum(group, ticket_, "forward", 0, 2, 0); });
  }

  Ticket ticket_;
  std::string text_;
  std::atomic<bool> has_begun_{false};
  std::thread thread_;
};

TEST(FailEndsWaits) {
  Group group("layer");
  Waiting waiting(&group);
  group.Fail("the ship sinks");
  CheckHas(waiting.Text(), "the ship sinks");
}

TEST(ResetMakesTheGroupReady) {
  Group group("layer");
  Waiting waiting(&group);
  group.Reset();
  CheckHas(waiting.Text(), "the layer was reset while a device waited in it");
  CHECK_EQ(group.Failure(), "");
  Parallel(2, [&](int id) { CHECK_EQ(Forward(&group, id, 2, 1 + id), 3); });
  CheckHas(ErrorOf([&] { Sum(&group, waiting.ticket(), "backward", 0, 2, 0); }), "was reset by");
}

// ---- other devices than before -----------------------------------------------------------------

TEST(NetMoves) {
  Group group("layer");
  for (int first : {0, 2, 4}) {
    Parallel(2, [&](int i) {
      for (int step = 0; step < 3; ++step) {
        CHECK_EQ(Forward(&group, first + i, 2, first + i), 2 * first + 1);
      }
    });
  }
}

// A third device looks like a net that has moved, until one of the old devices calls again.
TEST(MoreDevicesThanTheGroupHas) {
  Group group("layer");
  std::vector<Ticket> tickets(2);
  Parallel(2, [&](int id) {
    tickets[id] = group.BeginForward(Cpu(id), 2);
    Sum(&group, tickets[id], "forward", id, 2, 0);
  });
  std::thread third([&] { ErrorOf([&] { Forward(&group, 2, 2, 0, 0.5); }); });
  Sleep(50);
  const std::string backward = ErrorOf([&] { Sum(&group, tickets[0], "backward", 0, 2, 0); });
  CheckHas(backward, "num_devices=");
  CheckHas(backward, "cpu(0) calls the layer as well as cpu(2)");
  // This number must not be reduced with that of the third device.
  const std::string forward = ErrorOf([&] { Forward(&group, 0, 2, 0, 0.5); });
  CheckHas(forward, "cpu(0) calls the layer as well as cpu(2)");
  third.join();
  CHECK(!group.Failure().empty());
}

TEST(MoreDevicesWhileOneWaits) {
  Group group("layer");
  Waiting waiting(&group);
  const Ticket second = group.BeginForward(Cpu(1), 2);
  CheckHas(ErrorOf([&] { Forward(&group, 2, 2, 0); }), "num_devices=2, but cpu(2) calls the layer");
  CheckHas(ErrorOf([&] { Sum(&group, second, "forward", 1, 2, 0); }), "earlier error");
  CheckHas(waiting.Text(), "num_devices=2");
}

TEST(DevicesThatReturnAfterAMove) {
  Group group("layer");
  for (int id : {0, 1}) Forward(&group, id, 1, 0);
  CheckHas(ErrorOf([&] { Forward(&group, 0, 1, 0); }), "num_devices=1, but cpu(0)");
  group.Reset();
  CHECK_EQ(Forward(&group, 0, 1, 7), 7);
}

// ---- registry ----------------------------------------------------------------------------------

TEST(OnlyParticipantsTakePart) {
  Group group("layer");
  Parallel(3, [&](int id) { CHECK_EQ(Forward(&group, id, 3, 1 + id), 6.0); });
  group.SetParticipants({Cpu(0), Cpu(2)});
  Ticket tickets[3];
  Parallel(3, [&](int id) {
    if (id == 1) return;
    tickets[id] = group.BeginForward(Cpu(id), 3);
    CHECK_EQ(Sum(&group, tickets[id], "forward", id, 3, 1 + id), 4.0);
  });
  group.SetParticipants({Cpu(1)});
  CHECK_EQ(Forward(&group, 1, 3, 5.0), 5.0);
  group.SetParticipants({});
  // A backward call has the participants of its forward call; then all have the same number again.
  Parallel(3, [&](int id) {
    if (id != 1) CHECK_EQ(Sum(&group, tickets[id], "backward", id, 3, 10.0 * id), 20.0);
    const Ticket ticket = group.BeginForward(Cpu(id), 3);
    CHECK_EQ(ticket.number, 3);
    CHECK_EQ(Sum(&group, ticket, "forward", id, 3, 1 + id), 6.0);
  });
}

TEST(DeviceThatArrivesAfterOthersTookPartAlone) {
  Group group("layer");
  group.SetParticipants({Cpu(0)});
  CHECK_EQ(Forward(&group, 0, 2, 7.0), 7.0);
  CHECK_EQ(Forward(&group, 0, 2, 8.0), 8.0);
  group.SetParticipants({});
  Parallel(2, [&](int id) { CHECK_EQ(Forward(&group, id, 2, 1 + id), 3.0); });
  group.Reset();
  Parallel(2, [&](int id) { CHECK_EQ(group.BeginForward(Cpu(id), 2).number, 3); });
}

TEST(DeviceThatSitsOut) {
  Group group("layer");
  group.SetParticipants({Cpu(0)});
  const std::string text = ErrorOf([&] { Forward(&group, 1, 2, 1); });
  CheckHas(text, "SyncBatchNorm 'layer': cpu(1) calls the layer, but only cpu(0) take part");
  CHECK_EQ(group.Failure(), text);
}

TEST(Registry) {
  syncbn::Registry& registry = syncbn::Registry::Get();
  const auto group = registry.FindOrCreate("key", "layer");
  CHECK(registry.FindOrCreate("key", "other name") == group);
  CHECK(registry.FindOrCreate("other key", "layer") != group);
  CHECK_EQ(registry.FirstFailure(), "");
  registry.FailAll("all stop");
  CHECK_EQ(registry.FirstFailure(), "all stop");
  registry.ResetAll();
  CHECK_EQ(registry.FirstFailure(), "");
  registry.Release("key");
  CHECK(registry.Find("key") == nullptr);
  CHECK_EQ(group->layer(), "layer");  // an operator in flight still holds it
}

// ---- stress ------------------------------------------------------------------------------------

// Forward and backward; every device is sometimes late, and a wrong rendezvous makes a wrong sum.
void Stress(int threads) {
  Group group("layer");
  const int rounds = kStressRounds / 2;
  Parallel(threads, [&](int id) {
    std::mt19937 random(id);
    for (int step = 0; step < rounds; ++step) {
      if (random() % 2000 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
      }
      if (random() % 8 == 0) std::this_thread::yield();
      const Ticket ticket = group.BeginForward(Cpu(id), threads);
      const double sum = Sum(&group, ticket, "forward", id, threads, step);
      const double back = Sum(&group, ticket, "backward", id, threads, step + id);
      CHECK_EQ(sum, double(step) * threads);
      CHECK_EQ(back, double(step) * threads + threads * (threads - 1) / 2);
    }
  });
}

TEST(StressOfSeveralSizes) {
  for (int threads : {2, 3, 5, 8}) Stress(threads);
}

}  // namespace

int main() { return check::RunTests(); }
