// Tests groups: order, failures, resets, moves, and many rendezvous under random delays. A device
// is a thread here. A lost wake-up ends in a timeout, of the group or of ctest.
#include <atomic>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collective/common/timeout.h"
#include "collective/devices/group.h"
#include "collective/devices/registry.h"

namespace {

using syncbn::AllReduceOptions;
using syncbn::Device;
using syncbn::ReduceOperation;
using syncbn::Ticket;
using syncbn::ToBytes;
using Numbers = std::vector<double>;

Device Cpu(int id) { return {"cpu", id}; }

// The group of a layer on `size` devices, of which each contributes one number.
struct Layer {
  Ticket Begin(int id) { return group.BeginForward(Cpu(id), size); }

  AllReduceOptions Of(const Ticket& ticket, const std::string& phase, int id, double number) const {
    AllReduceOptions options;
    options.ticket = ticket;
    options.phase = phase;
    options.device = Cpu(id);
    options.arrival = {"same", syncbn::Concat("(", id, ")"), ToBytes<double>({number})};
    options.size = size;
    options.timeout_seconds = timeout;
    return options;
  }

  double Sum(AllReduceOptions options) {
    return syncbn::FromBytes<double>(*group.AllReduce(std::move(options)))[0];
  }
  double Forward(int id, double number = 0) { return Sum(Of(Begin(id), "forward", id, number)); }
  double Backward(const Ticket& ticket, int id, double number = 0) {
    return Sum(Of(ticket, "backward", id, number));
  }

  size_t size;
  double timeout = 60;
  syncbn::Group group{"layer"};
};

// ---- numbers -----------------------------------------------------------------------------------

TEST(MomentsAreMergedByChannel) {
  const struct {
    Numbers lower, higher, merged;  // count, means, m2s
  } table[] = {
      {{2, 1, 10, 0.5, 0}, {2, 3, 10, 0.5, 8}, {4, 2, 10, 5, 8}},
      {{0, 0, 0}, {3, 2, 1}, {3, 2, 1}},
      {{3, 2, 1}, {0, 0, 0}, {3, 2, 1}},
      {{0, 0, 0}, {0, 0, 0}, {0, 0, 0}},
  };
  for (const auto& row : table) {
    syncbn::Bytes result = ToBytes(row.lower);
    Reduce(ReduceOperation::kMoments, ToBytes(row.higher), &result);
    CHECK(result == ToBytes(row.merged), row.lower[0], " and ", row.higher[0]);
  }
}

// Each device is the last to arrive in turn. As texts, the ids 9 and 10 would be in another order.
TEST(ResultIsInTheOrderOfDevices) {
  const int ids[] = {9, 10, 2};
  for (int late = 0; late < 3; ++late) {
    Layer layer{3};
    Parallel(3, [&](int i) {
      if (i == late) Sleep(20);
      AllReduceOptions options = layer.Of(layer.Begin(ids[i]), "forward", ids[i], ids[i]);
      options.operation = ReduceOperation::kConcat;
      CHECK(*layer.group.AllReduce(options) == ToBytes(Numbers({2, 9, 10})));
    });
  }
}

// ---- rendezvous --------------------------------------------------------------------------------

// cpu(0) begins backward with the second call, cpu(1) with the first.
TEST(TwoRendezvousCrosswise) {
  Layer layer{2};
  Parallel(2, [&](int id) {
    const Ticket a = layer.Begin(id);
    CHECK_EQ(layer.Sum(layer.Of(a, "forward", id, 1 + id)), 3);
    const Ticket b = layer.Begin(id);
    CHECK_EQ(layer.Sum(layer.Of(b, "forward", id, 10)), 20);
    const auto backward = [&](const Ticket& ticket) {
      CHECK_EQ(layer.Backward(ticket, id, 5 + ticket.number), 10 + 2 * ticket.number);
    };
    std::thread early([&] { backward(id == 0 ? b : a); });
    Sleep(5);
    backward(id == 0 ? a : b);
    early.join();
  });
}

TEST(EachRepeatOfBackwardIsARendezvous) {
  Layer layer{2};
  Parallel(2, [&](int id) {
    const Ticket ticket = layer.Begin(id);
    for (int repeat = 0; repeat < 3; ++repeat) {
      AllReduceOptions options = layer.Of(ticket, "backward", id, repeat);
      options.repeat = repeat;
      CHECK_EQ(layer.Sum(options), 2 * repeat);
    }
  });
}

// Beyond the range of the clock.
TEST(EndlessTimeouts) {
  for (double timeout : {1e9, 9.3e9, 1e300, std::numeric_limits<double>::infinity()}) {
    const auto years = std::chrono::hours(24 * 365 * 30);
    CHECK(syncbn::Clock::now() + syncbn::ToDuration(timeout) > syncbn::Clock::now() + years);
    Layer layer{2, timeout};
    Parallel(2, [&](int id) {
      if (id == 1) Sleep(20);
      CHECK_EQ(layer.Forward(id, 1), 2);
    });
  }
}

// Every device is sometimes late, and a wrong rendezvous makes a wrong sum.
TEST(Stress) {
  for (int devices : {2, 3, 5, 8}) {
    Layer layer{static_cast<size_t>(devices)};
    Parallel(devices, [&](int id) {
      std::mt19937 random(id);
      for (int step = 0; step < check::Rounds(50000); ++step) {
        if (random() % 2000 == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
        }
        if (random() % 8 == 0) std::this_thread::yield();
        const Ticket ticket = layer.Begin(id);
        CHECK_EQ(layer.Sum(layer.Of(ticket, "forward", id, step)), step * devices);
        CHECK_EQ(layer.Backward(ticket, id, step + id),
                 step * devices + devices * (devices - 1) / 2);
      }
    });
  }
}

// ---- failures ----------------------------------------------------------------------------------

TEST(TimeoutNamesWhoIsMissing) {
  Layer layer{3};
  Parallel(3, [&](int id) { layer.Forward(id); });
  layer.timeout = 0.2;
  std::string texts[2];
  Parallel(2, [&](int id) { texts[id] = ErrorOf([&] { layer.Forward(2 * id); }); });
  CHECK_EQ(texts[0], texts[1]);
  CheckHas(texts[0], "SyncBatchNorm 'layer', forward: waited 0.");
  CheckHas(texts[0], "Arrived: cpu(0) with shape (0), cpu(2) with shape (2). Missing: cpu(1).");
  CHECK_EQ(layer.group.Failure(), texts[0]);
}

// The text where device 0 waits for device 1. Both have a call queued; `repeats` are later calls of
// static graphs, of which nobody knows whether they are queued.
std::string TimeoutOf(const std::string& type, bool repeats) {
  Layer layer{2, 0.02};
  syncbn::CallLog& calls = layer.group.calls();
  const Device here{type, 0}, there{type, 1};
  const auto epoch = calls.NoteQueued(here);
  calls.NoteQueued(there);
  calls.NoteBegun(here, epoch, true);
  if (repeats) {
    calls.NoteBegun(there, epoch, true);
    calls.NoteBegun(here, epoch, false);
  }
  AllReduceOptions options = layer.Of(layer.group.BeginForward(here, 2), "forward", 0, 1);
  options.device = here;
  options.expected = {here, there};
  return ErrorOf([&] { layer.group.AllReduce(options); });
}

TEST(TimeoutNamesTheCauseOfQueuedCalls) {
  for (bool repeats : {false, true}) {
    CheckHas(TimeoutOf("cpu", repeats), "Likely cause: a plain loop over CPU contexts");
  }
  CheckHas(TimeoutOf("gpu", false), "an operator in front of this layer has failed on gpu(1)");
  CheckHas(TimeoutOf("gpu", true), "the net was not called for gpu(1)");
}

TEST(LateArrivalLearnsOfTheFailure) {
  Layer layer{2, 0.02};
  const Ticket late = layer.Begin(1);
  ErrorOf([&] { layer.Forward(0); });
  const std::string text = ErrorOf([&] { layer.Sum(layer.Of(late, "forward", 1, 0)); });
  CheckHas(text, "cpu(1) stopped because of an earlier error: SyncBatchNorm 'layer', forward: wai");
  CheckHas(ErrorOf([&] { layer.Begin(1); }), "earlier error");
}

// The error of two devices that contribute to one rendezvous, the same on both.
std::string ErrorOfTwo(const AllReduceOptions& first, const AllReduceOptions& second) {
  Layer layer{2};
  std::string texts[2];
  Parallel(2, [&](int i) {
    AllReduceOptions options = i == 0 ? first : second;
    options.ticket = layer.Begin(i);
    texts[i] = ErrorOf([&] { layer.Sum(options); });
  });
  CHECK_EQ(texts[0], texts[1]);
  return texts[0];
}

TEST(ContributionsThatDoNotFitTogether) {
  const Layer layer{2};
  const AllReduceOptions first = layer.Of({}, "forward", 0, 0);
  AllReduceOptions blue = layer.Of({}, "forward", 1, 0), longer = blue, twice = first;
  blue.arrival.signature = "blue";
  CheckHas(ErrorOfTwo(first, blue), "SyncBatchNorm 'layer', forward: devices disagree: cpu(");
  CheckHas(ErrorOfTwo(first, blue), " has same (shape (0))");
  CheckHas(ErrorOfTwo(first, blue), " has blue (shape (1))");
  longer.arrival.payload = ToBytes(Numbers(2));
  CheckHas(ErrorOfTwo(first, longer),
           "SyncBatchNorm 'layer', forward: a sum of 8 bytes cannot take one of 16");
  CheckHas(ErrorOfTwo(first, twice), "SyncBatchNorm 'layer', forward: cpu(0) arrived twice");
}

// cpu(0), which waits for a second device.
class Waiting {
 public:
  explicit Waiting(Layer* layer)
      : ticket(layer->Begin(0)), thread_([this, layer] {
          text_ = ErrorOf([&] { layer->Sum(layer->Of(ticket, "forward", 0, 0)); });
        }) {
    Sleep(10);
  }
  // Its error.
  std::string Text() {
    thread_.join();
    return text_;
  }
  const Ticket ticket;

 private:
  std::string text_;
  std::thread thread_;
};

TEST(FailEndsWaits) {
  Layer layer{2};
  Waiting waiting(&layer);
  layer.group.Fail("the ship sinks");
  CheckHas(waiting.Text(), "the ship sinks");
}

TEST(ResetMakesTheGroupReady) {
  Layer layer{2};
  Waiting waiting(&layer);
  layer.group.Reset();
  CheckHas(waiting.Text(), "the layer was reset while a device waited in it");
  CHECK_EQ(layer.group.Failure(), "");
  Parallel(2, [&](int id) { CHECK_EQ(layer.Forward(id, 1 + id), 3); });
  CheckHas(ErrorOf([&] { layer.Backward(waiting.ticket, 0); }), "was reset by");
}

TEST(Registry) {
  syncbn::Registry& registry = syncbn::Registry::Get();
  const auto group = registry.FindOrCreate("key", "layer");
  CHECK(registry.FindOrCreate("key", "other name") == group);
  for (const char* other : {"keyhole", "key/0"}) CHECK(registry.FindOrCreate(other, "") != group);
  CHECK_EQ(registry.FirstFailure(), "");
  registry.FailAll("all stop");
  CHECK_EQ(registry.FirstFailure(), "all stop");
  registry.ResetAll();
  CHECK_EQ(registry.FirstFailure(), "");
  registry.Release("key");
  for (const char* released : {"key", "key/0"}) CHECK(registry.Find(released) == nullptr);
  CHECK(registry.Find("keyhole") != nullptr);
  registry.FailAll("an operator in flight still holds it");
  CHECK(!group->Failure().empty());
}

// ---- other devices than before -----------------------------------------------------------------

TEST(NetMoves) {
  Layer layer{2};
  for (int first : {0, 2, 4}) {
    Parallel(2, [&](int i) {
      for (int step = 0; step < 3; ++step) CHECK_EQ(layer.Forward(first + i, 1 + i), 3);
    });
  }
}

// A third device looks like a net that has moved, until one of the old devices calls again.
TEST(MoreDevicesThanTheGroupHas) {
  for (const bool in_backward : {true, false}) {
    Layer layer{2};
    Ticket tickets[2];
    Parallel(2, [&](int id) {
      tickets[id] = layer.Begin(id);
      layer.Sum(layer.Of(tickets[id], "forward", id, 0));
    });
    std::thread third([&] { ErrorOf([&] { layer.Forward(2); }); });
    Sleep(50);
    // Its number must not be reduced with that of the third device.
    const std::string text =
        ErrorOf([&] { in_backward ? layer.Backward(tickets[0], 0) : layer.Forward(0); });
    CheckHas(text, "num_devices=2, but cpu(0) calls the layer as well as cpu(2)");
    third.join();
    CHECK_EQ(layer.group.Failure(), text);
  }
}

TEST(MoreDevicesWhileOneWaits) {
  Layer layer{2};
  Waiting waiting(&layer);
  const Ticket second = layer.Begin(1);
  CheckHas(ErrorOf([&] { layer.Forward(2); }), "num_devices=2, but cpu(2) calls the layer");
  CheckHas(ErrorOf([&] { layer.Sum(layer.Of(second, "forward", 1, 0)); }), "earlier error");
  CheckHas(waiting.Text(), "num_devices=2");
}

TEST(DevicesThatReturnAfterAMove) {
  Layer layer{1};
  for (int id : {0, 1}) layer.Forward(id);
  CheckHas(ErrorOf([&] { layer.Forward(0); }), "num_devices=1, but cpu(0)");
  layer.group.Reset();
  CHECK_EQ(layer.Forward(0, 7), 7);
}

TEST(OnlyParticipantsAreReduced) {
  Layer layer{3};
  Parallel(3, [&](int id) { CHECK_EQ(layer.Forward(id, 1 + id), 6); });
  layer.group.SetParticipants({Cpu(0), Cpu(2)});
  Ticket tickets[3];
  Parallel(2, [&](int i) {
    tickets[2 * i] = layer.Begin(2 * i);
    CHECK_EQ(layer.Sum(layer.Of(tickets[2 * i], "forward", 2 * i, 1 + 2 * i)), 4);
  });
  layer.group.SetParticipants({Cpu(1)});
  CHECK_EQ(layer.Forward(1, 5), 5);
  layer.group.SetParticipants({});
  // A backward call has the participants of its forward call; then all have the same number again.
  Parallel(3, [&](int id) {
    if (id != 1) CHECK_EQ(layer.Backward(tickets[id], id, 10 * id), 20);
    const Ticket ticket = layer.Begin(id);
    CHECK_EQ(ticket.number, 3);
    CHECK_EQ(layer.Sum(layer.Of(ticket, "forward", id, 1 + id)), 6);
  });
}

TEST(DeviceThatArrivesAfterAParticipant) {
  Layer layer{2};
  layer.group.SetParticipants({Cpu(0)});
  for (double number : {7, 8}) CHECK_EQ(layer.Forward(0, number), number);
  layer.group.SetParticipants({});
  Parallel(2, [&](int id) { CHECK_EQ(layer.Forward(id, 1 + id), 3); });
  layer.group.Reset();
  Parallel(2, [&](int id) { CHECK_EQ(layer.Begin(id).number, 3); });
}

TEST(DeviceThatIsNoParticipant) {
  Layer layer{2};
  layer.group.SetParticipants({Cpu(0)});
  const std::string text = ErrorOf([&] { layer.Begin(1); });
  CheckHas(text, "cpu(1) calls the layer, but gluon_syncbn.participating() names only cpu(0).");
  CHECK_EQ(layer.group.Failure(), text);
}

}  // namespace

int main() { return check::RunTests(); }
