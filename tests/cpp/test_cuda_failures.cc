// Tests the state after a failed CUDA call, and a layer's memory, on the emulated GPU, whose calls
// fail on demand.
#include <memory>
#include <string>
#include <vector>

#include "cuda_runtime.h"
#include "layer_shard.h"
#include "ranks.h"

using namespace test;

namespace {

// The allocations of a framework, which may change the thread's current device.
int pieces_taken[2], pieces_back[2];  // numbers of device and pinned allocations
bool framework_is_full = false;

std::shared_ptr<void> Allocate(const Device& device, syncbn::MemoryKind kind, size_t bytes) {
  CHECK_EQ(device.Name(), std::string("gpu(3)"));
  if (framework_is_full) throw syncbn::DeviceError("the framework has no memory");
  emulated::Device() = 2;
  const int k = kind == syncbn::MemoryKind::kPinned;
  ++pieces_taken[k];
  return std::shared_ptr<void>(new char[bytes], [k](void* data) {
    ++pieces_back[k];
    delete[] static_cast<char*>(data);
  });
}

const Setting kKeepsX{
    {Function::kLeakyRelu, 0.1}, true, WriteMode::kWrite, WriteMode::kWrite, true};

std::unique_ptr<syncbn::SyncBatchNorm> OnGpu(const Setting& setting,
                                             std::shared_ptr<syncbn::Layer> layer) {
  return MakeLayer(setting, 1, {"gpu", 3}, std::move(layer),
                   syncbn::MakeCudaBackend({"gpu", 3}, Allocate));
}

// A step of a new operator that keeps x. Every imperative call has a new operator.
void StepOfNewLayer(int64_t rows) {
  const auto layer = OnGpu(kKeepsX, std::make_shared<syncbn::Layer>("layer"));
  Shard shard(DType::kFloat32, rows, 0, true);
  shard.Step(layer.get(), kKeepsX, InPlace);
  // TrainOnCpu makes two steps, in which these results are equal.
  Compare(shard.y, TrainOnCpu(DType::kFloat32, {rows}, kKeepsX)[0].y, DType::kFloat32, 0, "y");
  const int taken = pieces_taken[0];
  shard.Step(layer.get(), kKeepsX, InPlace);
  CHECK_EQ(pieces_taken[0], taken, "memory for a second step");
}

// The framework allocates all memory. Blocks that a layer kept, or that became too small, are
// freed.
void TestMemory() {
  for (int64_t rows : {3, 30, 300, 30}) StepOfNewLayer(rows);
  CHECK_EQ(emulated::Allocations(), 0, "memory beside the framework's");
  CHECK_EQ(pieces_taken[1], 1, "pinned");
  CHECK_EQ(pieces_back[1], 0);
  CHECK_EQ(pieces_taken[0] - pieces_back[0], 2, "workspace and vectors of the lane");
  framework_is_full = true;
  CHECK_EQ(ErrorOf([] { StepOfNewLayer(30); }),
           "SyncBatchNorm 'layer', forward on gpu(3): the framework has no memory");
  syncbn::Table::Get().Reset();
  framework_is_full = false;
  CHECK_EQ(emulated::Device(), -1);
}

// Each call of a step fails in turn. Then the error names the layer, the device and the call, the
// thread has its previous device, and the next step is correct.
void TestFailures(const Setting& setting) {
  const auto shared = std::make_shared<syncbn::Layer>("norm3");
  const auto layer = OnGpu(setting, shared);
  bool failed = true;
  for (int calls = 0; failed; ++calls) {
    Shard shard(DType::kFloat32, 3, 0, setting.keeps_x);
    emulated::Device() = 9;
    emulated::FailAfter(calls);
    const std::string text = ErrorOf([&] { shard.Step(layer.get(), setting, InPlace); });
    emulated::FailAfter(-1);
    failed = text != kNoError;
    if (failed) {
      CHECK(text.find("SyncBatchNorm 'norm3', ") == 0, text);
      CheckHas(text, " on gpu(3): CUDA: ");
      CheckHas(text, "failed: out of memory (cudaErrorMemoryAllocation)");
      CHECK_EQ(syncbn::Table::Get().Failure(), text);
      syncbn::Table::Get().Reset();
    }
    CHECK(calls < 1000);
    CHECK_EQ(emulated::Device(), 9);
  }
  Shard shard(DType::kFloat32, 3, 0, setting.keeps_x);
  shard.Step(layer.get(), setting, InPlace);
  std::vector<Shard> expected = TrainOnCpu(DType::kFloat32, {3}, setting);
  Compare(shard.y, expected[0].y, DType::kFloat32, 0, "y after failures");
  Compare(shard.dx, expected[0].dx, DType::kFloat32, 0, "dx after failures");
}

// A process fails before its first exchange, while the others already wait. In prediction no
// process waits, so the failure is not reported.
void TestOtherProcessesLearnOfAFailure() {
  const auto network = std::make_shared<Network>(2);
  syncbn::Table::Get().Connect(std::make_unique<LocalTransport>(network, 0));
  Rank other(network, 1);
  const auto layer = OnGpu({}, std::make_shared<syncbn::Layer>("norm3"));
  Shard shard(DType::kFloat32, 3, 0, false);
  for (bool training : {false, true}) {
    Setting setting;
    setting.training = training;
    emulated::FailAfter(0);
    CHECK(ErrorOf([&] { shard.Step(layer.get(), setting, InPlace); }) != kNoError);
    emulated::FailAfter(-1);
    CHECK_EQ(other.Failure().empty(), !training);
    syncbn::Table::Get().Reset();
  }
  CheckHas(other.Failure(), "SyncBatchNorm 'norm3', forward on gpu(3): CUDA: ");
}

// docs/design/kernels.md lists the same launches and waits of a step.
void TestLaunchesAndWaits() {
  for (bool training : {true, false}) {
    Setting setting;
    setting.training = training;
    const auto layer = OnGpu(setting, std::make_shared<syncbn::Layer>("layer"));
    Shard shard(DType::kFloat32, 3, 0, false);
    const auto launches = [] {
      int sum = 0;
      for (const auto& kernel : emulated::Launches()) sum += kernel.second;
      return sum;
    };
    const int launches_before = launches(), waits_before = emulated::Waits();
    shard.Step(layer.get(), setting, InPlace);
    CHECK_EQ(launches() - launches_before, (training ? 4 : 3) + 4);
    CHECK_EQ(emulated::Waits() - waits_before, 2 + 2);
  }
}

void TestNoSuchDevice() {
  CHECK_EQ(ErrorOf([] { syncbn::MakeCudaBackend({"gpu", 4}, Allocate); }),
           "SyncBatchNorm on gpu(4): the device must be one of the 4 CUDA devices of this process");
}

}  // namespace

int main() {
  TestMemory();
  TestLaunchesAndWaits();
  TestFailures({});
  Setting prediction;
  prediction.training = false;
  TestFailures(prediction);
  for (bool keeps_x : {false, true}) {
    TestFailures(
        {{Function::kLeakyRelu, 0.1}, true, WriteMode::kWrite, WriteMode::kWrite, keeps_x});
  }
  TestNoSuchDevice();
  TestOtherProcessesLearnOfAFailure();  // last, because it connects to other ranks
  return check::Result();
}
