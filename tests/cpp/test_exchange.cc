// Test exchanges of the devices of one process: random devices under random delays, failures,
// resets, moves. A device is a thread here. A lost wake-up ends in a timeout of the table or ctest.
#include <functional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/program.h"
#include "exchange/table.h"

namespace {

using syncbn::Contribution;
using syncbn::Device;
using syncbn::Numbers;
using syncbn::Operation;
using syncbn::Phase;
using syncbn::Ticket;

Device Cpu(int id) { return {"cpu", id}; }

// A layer on `size` devices with a table of its own. Each device contributes one number.
struct Layer {
  Contribution Of(int id, double number) {
    Contribution own;
    own.members = &members;
    own.device = Cpu(id);
    own.shape = {id};
    own.signature.channels = 1;
    own.numbers = {number};
    own.devices = size;
    own.timeout_seconds = timeout;
    return own;
  }
  double Sum(const Contribution& own, Ticket* ticket) { return table.Contribute(own, ticket)[0]; }
  double Forward(int id, double number = 0, Ticket* ticket = nullptr) {
    Ticket own;
    return Sum(Of(id, number), ticket == nullptr ? &own : ticket);
  }
  double Backward(Ticket ticket, int id, double number = 0, int64_t repeat = 0) {
    Contribution own = Of(id, number);
    own.phase = Phase::kBackward;
    own.repeat = repeat;
    return Sum(own, &ticket);
  }

  size_t size;
  double timeout = 60;
  syncbn::Table table{};
  syncbn::Members members{"layer"};
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
    syncbn::Exchange exchange;
    exchange.signature.operation = Operation::kMoments;
    exchange.parts[{0, Cpu(9)}].numbers = row.lower;
    exchange.parts[{0, Cpu(10)}].numbers = row.higher;
    CHECK(exchange.Reduce() == row.merged, row.lower[0], " and ", row.higher[0]);
  }
}

// Run training steps of a device, which is late now and then. All devices of the step are `ids`,
// ascending. Another exchange, or another order of the devices, makes another sum.
void Train(Layer* layer, const std::vector<int>& ids, int id, int steps) {
  std::mt19937 random(static_cast<uint32_t>(id));
  for (int step = 0; step < steps; ++step) {
    if (random() % 2000 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    }
    if (random() % 8 == 0) std::this_thread::yield();
    Ticket ticket;
    for (int call = 0; call < 2 + step % 2; ++call) {  // forward, then backward, which may repeat
      const auto number = [&](int device) { return 1.0 / (3 * step + call + 7 * device + 1); };
      double expected = number(ids[0]);
      for (size_t i = 1; i < ids.size(); ++i) expected += number(ids[i]);
      const double sum = call == 0 ? layer->Forward(id, number(id), &ticket)
                                   : layer->Backward(ticket, id, number(id), call - 1);
      CHECK_EQ(sum, expected, "step ", step);
    }
  }
}

// Some of the devices make the steps, then all, then others after a move, again and again. The ids
// 9 and 10 would have another order as texts.
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
      layer.table.SetParticipants(&layer.members, some ? participants : std::set<Device>());
      Parallel(static_cast<int>(ids.size()),
               [&](int i) { Train(&layer, ids, ids[i], check::Rounds(4000)); });
      if (span % 3 == 2) first += size;
      if (span == 8) {  // devices may return
        layer.table.Reset();
        first = 0;
      }
    }
  }
}

// cpu(0) begins backward with the second call, cpu(1) with the first.
TEST(TwoCallsCrosswise) {
  Layer layer{2};
  Parallel(2, [&](int id) {
    Ticket tickets[2];
    for (Ticket& ticket : tickets) layer.Forward(id, 0, &ticket);
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
  Ticket tickets[3];
  Parallel(3, [&](int id) { layer.Forward(id, 0, &tickets[id]); });
  layer.timeout = 0.2;
  syncbn::SetLocator([] { syncbn::ReportWhere("\nThe program stands at a line"); });
  std::string texts[2];
  Parallel(2, [&](int id) { texts[id] = ErrorOf([&] { layer.Forward(2 * id); }); });
  syncbn::SetLocator(nullptr);
  CHECK_EQ(texts[0], texts[1]);
  CheckHas(texts[0], "SyncBatchNorm 'layer', forward: waited 0.");
  CheckHas(texts[0], "clears the error.\nThe program stands at a line\nThe usual causes");
  CheckHas(texts[0], "Arrived: cpu(0) with shape (0), cpu(2) with shape (2). Missing: cpu(1).");
  CHECK_EQ(layer.table.Failure(), texts[0]);
  CheckHas(ErrorOf([&] { layer.Backward(tickets[1], 1); }),
           "cpu(1) stopped because of an earlier error: " + texts[0]);
  layer.table.Reset();
  CheckHas(ErrorOf([&] { layer.Backward(tickets[1], 1); }), "recover() or a conversion of the net");
  CHECK_EQ(layer.table.Failure(), "");
}

// Return the error of two devices that contribute to one exchange. Both raise the same error.
std::string ErrorOfTwo(Layer* layer, const Contribution& first, const Contribution& second) {
  std::string texts[2];
  Parallel(2, [&](int i) {
    Ticket ticket;
    texts[i] = ErrorOf([&] { layer->Sum(i == 0 ? first : second, &ticket); });
  });
  layer->table.Reset();
  CHECK_EQ(texts[0], texts[1]);
  return texts[0];
}

TEST(ContributionsThatDoNotFitTogether) {
  Layer layer{2};
  const Contribution first = layer.Of(0, 0);
  Contribution blue = layer.Of(1, 0), longer = blue, more = blue;
  blue.signature.channels = 2;
  CheckHas(ErrorOfTwo(&layer, first, blue), "'layer', forward: devices disagree: cpu(");
  CheckHas(ErrorOfTwo(&layer, first, blue), "cpu(0) has channels=1, dtype=float32, axis=0");
  CheckHas(ErrorOfTwo(&layer, first, blue), "num_devices=2 (shape (1))");
  more.devices = 3;
  CheckHas(ErrorOfTwo(&layer, first, more), "epsilon=0, num_devices=3 (shape (1))");
  longer.numbers = Numbers(2);
  CheckHas(ErrorOfTwo(&layer, first, longer), "SyncBatchNorm 'layer', forward: all places must");
  Ticket ticket;
  Parallel(2, [&](int id) { id == 0 ? layer.Forward(id, 0, &ticket) : layer.Forward(id); });
  Contribution twice = first;
  twice.phase = Phase::kBackward;
  std::string texts[2];
  Parallel(2, [&](int i) {
    Ticket copy = ticket;
    texts[i] = ErrorOf([&] { layer.Sum(twice, &copy); });
  });
  CheckHas(texts[0] + texts[1], "SyncBatchNorm 'layer', backward: cpu(0) arrived twice");
}

// Return the error of a device that waits for others while `action` runs.
std::string ErrorOfWait(Layer* layer, int id, const std::function<void()>& action) {
  std::string text;
  std::thread waiting([&] { text = ErrorOf([&] { layer->Forward(id); }); });
  Sleep(50);
  action();
  waiting.join();
  return text;
}

// The first failure ends the calls of all layers of the process.
TEST(OneFailureEndsAllWaits) {
  Layer layer{2};
  syncbn::Members other("other");
  Contribution own = layer.Of(0, 0);
  own.members = &other;
  Ticket ticket;
  const auto fail = [&] {
    own.timeout_seconds = 0.01;
    CheckHas(ErrorOf([&] { layer.Sum(own, &ticket); }), "'other', forward: waited");
  };
  CheckHas(ErrorOfWait(&layer, 0, fail), "forward: SyncBatchNorm 'other', forward: waited");
  CheckHas(ErrorOf([&] { layer.Forward(1); }), "cpu(1) stopped because of an earlier error");
  layer.table.Fail("a later failure", false);
  CheckHas(layer.table.Failure(), "'other', forward: waited");
}

TEST(AResetEndsAllWaits) {
  Layer layer{2};
  const auto reset = [&] {
    CHECK(layer.table.LongestWait() > 0);
    layer.table.Reset();
  };
  CheckHas(ErrorOfWait(&layer, 0, reset), "the layer was reset while a device waited in it");
  CHECK_EQ(layer.table.LongestWait(), 0);
  Parallel(2, [&](int id) { CHECK_EQ(layer.Forward(id, 1), 2); });
}

// ---- other devices than before -----------------------------------------------------------------

// The device is none of the devices that the caller expects, as in a graph that was moved.
TEST(AnotherDeviceThanExpected) {
  Layer layer{2, 0.1};
  Contribution own = layer.Of(2, 0);
  const std::set<Device> expected{Cpu(0), Cpu(1)};
  own.expected = &expected;
  Ticket ticket;
  CheckHas(ErrorOf([&] { layer.Sum(own, &ticket); }),
           "num_devices=2, but cpu(2) calls the layer as well as cpu(0), cpu(1)");
}

// A third device looks like a net that has moved, until one of the old devices calls again.
TEST(MoreDevicesThanTheLayerHas) {
  for (const bool in_backward : {true, false}) {
    Layer layer{2};
    Ticket tickets[2];
    Parallel(2, [&](int id) { layer.Forward(id, 0, &tickets[id]); });
    // Its number must not be reduced with the third device's number.
    const auto call_again = [&] { in_backward ? layer.Backward(tickets[0], 0) : layer.Forward(0); };
    std::string text;
    const std::string third = ErrorOfWait(&layer, 2, [&] { text = ErrorOf(call_again); });
    CheckHas(text, "num_devices=2, but cpu(0) calls the layer as well as cpu(2)");
    CheckHas(third, text);
    CHECK_EQ(layer.table.Failure(), text);
  }
}

TEST(MoreDevicesWhileOneWaits) {
  Layer layer{2};
  Parallel(2, [&](int id) { layer.Forward(id); });
  const auto third = [&] { CheckHas(ErrorOf([&] { layer.Forward(2); }), "but cpu(2) calls"); };
  CheckHas(ErrorOfWait(&layer, 0, third), "num_devices=2, but cpu(2) calls the layer");
}

// New options may have another number of devices, and any devices may call then.
TEST(ARestartForgetsDevices) {
  Layer layer{1};
  for (int id : {0, 0, 1}) layer.Forward(id);
  layer.size = 2;
  layer.table.Restart(&layer.members);
  Parallel(2, [&](int id) { CHECK_EQ(layer.Forward(id, 1), 2); });
}

// A backward call has the participants of its forward call.
TEST(ParticipantsChangeBetweenForwardAndBackward) {
  Layer layer{3};
  layer.table.SetParticipants(&layer.members, {Cpu(0), Cpu(2)});
  CheckHas(ErrorOf([&] { layer.Forward(1); }), "shards on cpu(0), cpu(2)");
  layer.table.Reset();
  Ticket tickets[3];
  Parallel(2, [&](int i) { CHECK_EQ(layer.Forward(2 * i, 1, &tickets[2 * i]), 2); });
  layer.table.SetParticipants(&layer.members, {});
  Parallel(3, [&](int id) {
    if (id != 1) CHECK_EQ(layer.Backward(tickets[id], id, 10 * id), 20);
    CHECK_EQ(layer.Forward(id, 1 + id), 6);
  });
}

}  // namespace

int main() { return check::RunTests(); }
