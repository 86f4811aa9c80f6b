// Tests the operator without its passes: the choice of a backend, and refused arguments.
#include "check.h"
#include "layer_shard.h"
#include "op/backend.h"
#include "ranks.h"

namespace {

using test::Shard;

TEST(GpuIsRefusedWhereCudaWasNotBuilt) {
  CheckHas(ErrorOf([] { syncbn::MakeBackend({"gpu", 1}, nullptr); }),
           "SyncBatchNorm on gpu(1): gluon_syncbn must be built with CUDA, got a build for CPUs "
           "because it was built for native tests. Install a working nvcc");
}

// The parts of a call of the native operator: nothing blocks the thread that begins calls.
TEST(OneThreadBeginsTheCallsOfTwoDevices) {
  const test::Setting setting;
  const auto shared = test::MakeLayer(setting, 2);
  const auto expected = test::TrainOnCpu(syncbn::DType::kFloat32, {2, 3}, setting);
  std::vector<std::unique_ptr<syncbn::SyncBatchNorm>> layers;
  std::vector<Shard> shards;
  for (int k : {0, 1}) {
    layers.push_back(std::make_unique<syncbn::SyncBatchNorm>(
        shared, false, syncbn::Device{"cpu", k}, syncbn::MakeCpuBackend()));
    shards.emplace_back(syncbn::DType::kFloat32, 2 + k, k, setting);
  }
  const auto run = [&](auto begin) {
    (shards[0].*begin)(layers[0].get(), setting);
    CHECK(!layers[0]->IsReady({}), "the other device has not begun");
    (shards[1].*begin)(layers[1].get(), setting);
    for (const auto& layer : layers) {
      CHECK(layer->IsReady({}), "both devices have begun");
      layer->Finish();
    }
  };
  for (int step = 0; step < 2; ++step) {
    run(&Shard::BeginForward);
    run(&Shard::BeginBackward);
  }
  for (size_t k = 0; k < 2; ++k) {
    CHECK_EQ(shards[k].y.Bytes() == expected[k].y.Bytes(), true);
    CHECK_EQ(shards[k].dx.Bytes() == expected[k].dx.Bytes(), true);
    CHECK_EQ(shards[k].var.Bytes() == expected[k].var.Bytes(), true);
  }
}

TEST(AFailureEndsACallThatHasBegun) {
  syncbn::SyncBatchNorm layer(test::MakeLayer({}, 2), false, {"cpu", 0}, syncbn::MakeCpuBackend());
  Shard shard(syncbn::DType::kFloat32, 2, 0, {});
  shard.BeginForward(&layer, {});
  syncbn::Table::Get().Fail("another device has failed", false);
  CHECK(layer.IsReady({}), "the wait has ended");
  CheckHas(ErrorOf([&] { layer.Finish(); }), "another device has failed");
  CheckHas(ErrorOf([&] { shard.BeginBackward(&layer, {}); }),
           "its forward call must have succeeded");
  syncbn::Table::Get().Reset();
}

// A call keeps the options that its layer had when the forward call began.
TEST(BackwardHasTheDevicesOfItsForward) {
  const auto shared = test::MakeLayer({}, 2);
  syncbn::SyncBatchNorm layer(shared, false, {"cpu", 0}, syncbn::MakeCpuBackend());
  Shard shard(syncbn::DType::kFloat32, 2, 0, {});
  shared->SetParticipants({{"cpu", 0}});
  shard.BeginForward(&layer, {});
  layer.Finish();
  shared->SetParticipants({});
  shard.BeginBackward(&layer, {});
  CHECK(layer.IsReady({}), "the other device took no part in forward");
  layer.Finish();
  shard.BeginForward(&layer, {});
  CHECK(!layer.IsReady({}), "the other device has not begun");
  syncbn::Table::Get().Fail("the test ends", false);
  CheckHas(ErrorOf([&] { layer.Finish(); }), "the test ends");
  syncbn::Table::Get().Reset();
}

// If a device refuses one of its arrays, the other devices and ranks of the group get the error.
// This test is the last one, because a failure that was sent to ranks stays.
TEST(AVectorOfAnotherSizeIsRefusedAndTheOthersAreTold) {
  const auto network = std::make_shared<Network>(2);
  syncbn::Table::Get().Connect(std::make_unique<LocalTransport>(network, 0));
  Rank other(network, 1);
  const auto shared = test::MakeLayer({}, 1);
  for (const std::vector<int>& ranks : {std::vector<int>{0}, {0, 1}, {}}) {
    const int devices = ranks.empty() ? 2 : 1;
    syncbn::Options options = test::Setting().ToOptions(devices);
    options.ranks = ranks;
    shared->SetOptions(options);
    Parallel(devices, [&](int id) {
      syncbn::SyncBatchNorm layer(shared, false, {"cpu", id}, syncbn::MakeCpuBackend());
      Shard shard(syncbn::DType::kFloat32, 2, 0, {});
      if (id == 0) shard.var = test::Tensor(syncbn::DType::kFloat32, 0);
      CheckHas(ErrorOf([&] { shard.Step(&layer, {}); }),
               "forward on cpu(0): parameters and other vectors must have the shape (5)");
    });
    const std::string text = other.Failure();
    CHECK_EQ(text.empty(), ranks.size() == 1);
    if (!text.empty()) CheckHas(text, "SyncBatchNorm 'layer', forward on cpu(0): parameters");
    syncbn::Table::Get().Reset();
    other.Reset();
  }
}

}  // namespace

int main() { return check::RunTests(); }
