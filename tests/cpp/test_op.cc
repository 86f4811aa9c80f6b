// Tests the operator without its passes: the choice of a backend, and refused arguments.
#include "check.h"
#include "layer_shard.h"
#include "op/backend.h"
#include "ranks.h"

namespace {

TEST(GpuIsRefusedWhereCudaWasNotBuilt) {
  CheckHas(ErrorOf([] { syncbn::MakeBackend({"gpu", 1}, nullptr); }),
           "SyncBatchNorm on gpu(1): gluon_syncbn must be built with CUDA, got a build for CPUs "
           "because it was built for native tests. Install a working nvcc");
}

// A symbol from a file can be bound to arrays of other shapes.
TEST(AVectorOfAnotherSizeIsRefusedAndTheOthersAreTold) {
  const auto shared = std::make_shared<syncbn::Layer>("layer");
  std::string errors[2];
  Parallel(2, [&](int id) {
    const auto layer = test::MakeLayer({}, 2, {"cpu", id}, shared, syncbn::MakeCpuBackend());
    test::Shard shard(syncbn::DType::kFloat32, 2, 0, false);
    const auto vector = [&](test::Tensor& t, int64_t size) {
      return syncbn::Tensor{t.data(), {size}, syncbn::DType::kFloat32};
    };
    const int64_t channels = test::kChannels;
    errors[id] = ErrorOf([&] {
      layer->Forward(true, {{shard.x.data(), shard.shape, shard.dtype},
                            vector(shard.gamma, channels),
                            vector(shard.beta, channels),
                            syncbn::WriteMode::kWrite,
                            {shard.y.data(), shard.shape, shard.dtype},
                            vector(shard.mean, channels),
                            vector(shard.var, id == 1 ? 0 : channels)});
    });
  });
  for (const std::string& error : errors) {
    CheckHas(error, "forward on cpu(1): parameters and running statistics must have the shape (5)");
  }
  syncbn::Table::Get().Reset();
}

// A pending operator owns its layer after Python has released it.
TEST(TheRegistryFindsALayerAsLongAsItLives) {
  syncbn::Registry& registry = syncbn::Registry::Get();
  auto layer = registry.Create("key", "layer");
  CHECK_EQ(registry.Find("key"), layer);
  layer.reset();
  CheckHas(ErrorOf([&] { registry.Find("key"); }), "layer that is not in this process");
}

TEST(RanksThatDoNotHoldTheOwnOneAreRefused) {
  const auto network = std::make_shared<Network>(4);
  syncbn::Table::Get().Connect(std::make_unique<LocalTransport>(network, 0));
  for (const std::vector<int>& ranks : {std::vector<int>{1, 2}, {0, 4}}) {
    syncbn::Options options;
    options.ranks = ranks;
    options.timeout = 1;
    syncbn::SyncBatchNorm layer(options, {"cpu", 0}, std::make_shared<syncbn::Layer>("layer"),
                                syncbn::MakeCpuBackend());
    test::Shard shard(syncbn::DType::kFloat32, 2, 0, false);
    CheckHas(ErrorOf([&] { shard.Step(&layer, {}, test::InPlace); }),
             "its group must hold rank 0 and ranks below 4 only, got ranks up to");
  }
}

}  // namespace

int main() { return check::RunTests(); }
