// Tests groups: many rendezvous of random devices under random delays, failures, resets, moves. A
// device is a thread here. A lost wake-up ends in a timeout, of the group or of ctest.
#include <functional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collective/devices/group.h"
#include "core/program.h"
#include "op/registry.h"

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
    options.arrival = {"same", syncbn::Concat("(", id, ")"), {{number}, ""}};
    options.size = size;
    options.contribution.timeout_seconds = timeout;
    return options;
  }

  double Sum(AllReduceOptions options) {
    return group.AllReduce(std::move(options))->payload.numbers[0];
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

// ---- rendezvous --------------------------------------------------------------------------------

// Training steps of a device, which is late now and then; all devices of the step are `ids`,
// ascending. A wrong rendezvous, and another order of the devices, make a wrong result.
void Train(Layer* layer, const std::vector<int>& ids, int id, int steps) {
  std::mt19937 random(id);
  for (int step = 0; step < steps; ++step) {
    if (random() % 2000 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    }
    if (random() % 8 == 0) std::this_thread::yield();
    const Ticket ticket = layer->Begin(id);
    for (int call = 0; call < 2 + step % 2; ++call) {  // forward, then backward, which may repeat
      const double number = 1000.0 * step + 100 * call;
      AllReduceOptions options =
          layer->Of(ticket, call == 0 ? "forward" : "backward", id, number + id);
      options.repeat = call / 2;
      options.contribution.operation = ReduceOperation::kConcat;
      Numbers expected;
      for (int other : ids) expected.push_back(number + other);
      CHECK(layer->group.AllReduce(std::move(options))->payload.numbers == expected, "step ", step);
    }
  }
}

// The steps are made by some of the devices, by all, and after a move to others, again and again.
// As texts, the ids 9 and 10 would be in another order.
TEST(RandomDevices) {
  std::mt19937 random(1);
  for (int size : {2, 3, 5, 8}) {
    Layer layer{static_cast<size_t>(size)};
    int first = 0;
    for (int span = 0; span < 12; ++span) {
      std::vector<int> ids;
      std::set<Device> participants;
      const bool some = span % 2 == 0;
      for (int i = 0; i < size; ++i) {
        if (some && i > 0 && random() % 2 == 0) continue;
        ids.push_back(first + i);
        participants.insert(Cpu(first + i));
      }
      layer.group.SetParticipants(some ? participants : std::set<Device>());
      Parallel(static_cast<int>(ids.size()),
               [&](int i) { Train(&layer, ids, ids[i], check::Rounds(4000)); });
      if (span % 3 == 2) first += size;
      if (span == 8) {  // devices may return
        layer.group.Reset();
        first = 0;
      }
    }
  }
}

// cpu(0) begins backward with the second call, cpu(1) with the first.
TEST(TwoRendezvousCrosswise) {
  Layer layer{2};
  Parallel(2, [&](int id) {
    const Ticket tickets[] = {layer.Begin(id), layer.Begin(id)};
    const auto backward = [&](int call) {
      CHECK_EQ(layer.Backward(tickets[call], id, 5 + call), 10 + 2 * call);
    };
    std::thread early([&] { backward(1 - id); });
    Sleep(5);
    backward(id);
    early.join();
  });
}

// ---- failures ----------------------------------------------------------------------------------

TEST(TimeoutNamesWhoIsMissing) {
  Layer layer{3};
  Parallel(3, [&](int id) { layer.Forward(id); });
  const Ticket late = layer.Begin(1);
  layer.timeout = 0.2;
  std::string texts[2];
  Parallel(2, [&](int id) { texts[id] = ErrorOf([&] { layer.Forward(2 * id); }); });
  CHECK_EQ(texts[0], texts[1]);
  CheckHas(texts[0], "SyncBatchNorm 'layer', forward: waited 0.");
  CheckHas(texts[0], "Arrived: cpu(0) with shape (0), cpu(2) with shape (2). Missing: cpu(1).");
  CHECK_EQ(layer.group.Failure(), texts[0]);
  CheckHas(ErrorOf([&] { layer.Sum(layer.Of(late, "forward", 1, 0)); }),
           "cpu(1) stopped because of an earlier error: " + texts[0]);
  CheckHas(ErrorOf([&] { layer.Begin(1); }), "earlier error");
}

TEST(TimeoutShowsWhereTheProgramStands) {
  Layer layer{2, 0.02};
  AllReduceOptions options = layer.Of(layer.group.BeginForward(Device{"cpu", 0}, 2), "forward", 0, 1);
  syncbn::SetLocator([] { syncbn::TellWhere("\nThe program stands at a line"); });
  const std::string text = ErrorOf([&] { layer.group.AllReduce(options); });
  syncbn::SetLocator(nullptr);
  CheckHas(text, "clears the error.\nThe program stands at a line\nThe usual causes");
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
  longer.arrival.payload.numbers = Numbers(2);
  CheckHas(ErrorOfTwo(first, longer),
           "SyncBatchNorm 'layer', forward: a sum of 1 numbers cannot take one of 2");
  CheckHas(ErrorOfTwo(first, twice), "SyncBatchNorm 'layer', forward: cpu(0) arrived twice");
}

// The error of a device that waits for others while `action` is done.
std::string ErrorOfWait(Layer* layer, int id, const std::function<void()>& action) {
  std::string text;
  std::thread waiting([&] { text = ErrorOf([&] { layer->Forward(id); }); });
  Sleep(50);
  action();
  waiting.join();
  return text;
}

// An operator in flight holds a layer that Python has released.
TEST(FailAllReachesReleasedLayers) {
  syncbn::Registry& registry = syncbn::Registry::Get();
  auto layer = registry.Create("key", "layer");
  CHECK_EQ(registry.Find("key"), layer);
  registry.FailAll("all stop");
  CHECK_EQ(registry.FirstFailure(), "all stop");
  layer.reset();
  CHECK_EQ(registry.FirstFailure(), "");
  CheckHas(ErrorOf([&] { registry.Find("key"); }), "layer that is not in this process");
}

// ---- other devices than before -----------------------------------------------------------------

// A device that is none of those whose names the caller knows, as in a graph that was moved.
TEST(AnotherDeviceThanExpected) {
  Layer layer{2, 0.1};
  AllReduceOptions options = layer.Of(layer.Begin(2), "forward", 2, 0);
  options.expected = {Cpu(0), Cpu(1)};
  CheckHas(ErrorOf([&] { layer.Sum(options); }),
           "num_devices=2, but cpu(2) calls the layer as well as cpu(0), cpu(1)");
}

// A third device looks like a net that has moved, until one of the old devices calls again.
TEST(MoreDevicesThanTheGroupHas) {
  for (const bool in_backward : {true, false}) {
    Layer layer{2};
    Parallel(2, [&](int id) { layer.Forward(id); });
    // Its number must not be reduced with that of the third device.
    const auto call_again = [&] { in_backward ? layer.Backward({}, 0) : layer.Forward(0); };
    std::string text;
    const std::string third = ErrorOfWait(&layer, 2, [&] { text = ErrorOf(call_again); });
    CheckHas(text, "num_devices=2, but cpu(0) calls the layer as well as cpu(2)");
    CHECK_EQ(third, text);
    CHECK_EQ(layer.group.Failure(), text);
  }
}

TEST(MoreDevicesWhileOneWaits) {
  Layer layer{2};
  const Ticket second = layer.Begin(1);
  const auto third = [&] { CheckHas(ErrorOf([&] { layer.Forward(2); }), "but cpu(2) calls"); };
  CheckHas(ErrorOfWait(&layer, 0, third), "num_devices=2, but cpu(2) calls the layer");
  CheckHas(ErrorOf([&] { layer.Sum(layer.Of(second, "forward", 1, 0)); }), "earlier error");
}

// A backward call has the participants of its forward call.
TEST(ParticipantsChangeBetweenForwardAndBackward) {
  Layer layer{3};
  layer.group.SetParticipants({Cpu(0), Cpu(2)});
  Ticket tickets[3];
  for (int id : {0, 2}) tickets[id] = layer.Begin(id);
  layer.group.SetParticipants({});
  Parallel(3, [&](int id) {
    if (id != 1) CHECK_EQ(layer.Backward(tickets[id], id, 10 * id), 20);
    CHECK_EQ(layer.Forward(id, 1 + id), 6);
  });
  layer.group.SetParticipants({Cpu(0)});
  CheckHas(ErrorOf([&] { layer.Begin(1); }), "cpu(1) calls the layer, but this step has shards on "
                                             "cpu(0) only");
}

}  // namespace

int main() { return check::RunTests(); }
