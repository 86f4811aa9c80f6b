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

// If a device refuses one of its arrays, the other devices and ranks get the error.
TEST(AVectorOfAnotherSizeIsRefusedAndTheOthersAreTold) {
  const auto network = std::make_shared<Network>(2);
  syncbn::Table::Get().Connect(std::make_unique<LocalTransport>(network, 0));
  Rank other(network, 1);
  const auto shared = std::make_shared<syncbn::Layer>("layer");
  for (int devices : {1, 2}) {
    Parallel(devices, [&](int id) {
      syncbn::SyncBatchNorm layer(test::Setting().ToOptions(devices), {"cpu", id}, shared,
                                  syncbn::MakeCpuBackend());
      Shard shard(syncbn::DType::kFloat32, 2, 0, {});
      if (id == 0) shard.var = test::Tensor(syncbn::DType::kFloat32, 0);
      CheckHas(ErrorOf([&] { shard.Step(&layer, {}); }),
               "forward on cpu(0): parameters and other vectors must have the shape (5)");
    });
    CheckHas(other.Failure(), "SyncBatchNorm 'layer', forward on cpu(0): parameters");
    syncbn::Table::Get().Reset();
    other.Reset();
  }
}

}  // namespace

int main() { return check::RunTests(); }
