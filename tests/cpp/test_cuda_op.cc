// Compares a layer whose devices all compute on one GPU with a layer on as many CPU devices. ctest
// runs this test on the emulated GPU, and scripts/check_gpu.sh on a GPU. The emulated GPU can make
// calls fail, so there the test also checks the state after failed calls, and allocations.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "kernels/cuda/check.h"
#include "layer_shard.h"
#include "managed.h"

using namespace test;

namespace {

// Memory that lasts until the process ends.
std::shared_ptr<void> Allocate(const Device&, syncbn::MemoryKind kind, size_t bytes) {
  void* memory = nullptr;
  const bool pinned = kind == syncbn::MemoryKind::kPinned;
  SYNCBN_CUDA_CHECK(pinned ? cudaHostAlloc(&memory, bytes, cudaHostAllocMapped)
                           : cudaMalloc(&memory, bytes));
  return std::shared_ptr<void>(memory, [](void*) {});
}

void TestSetting(DType dtype, const std::vector<int64_t>& rows, const Setting& setting,
                 const std::string& name) {
  std::vector<Shard> gpu = Train(dtype, rows, setting, "gpu", [] {
    return syncbn::MakeCudaBackend({"gpu", 0}, Allocate);  // all devices compute on gpu(0)
  });
  std::vector<Shard> cpu = TrainOnCpu(dtype, rows, setting);
  // Compare allows y to differ by the distance of two adjacent numbers (Ulp). Gradients that are
  // computed from such a y differ by less than 10 times this distance.
  const double error = setting.from_output ? 10 * test::Ulp(dtype, 4) : 0;
  for (size_t k = 0; k < rows.size(); ++k) {
    Compare(gpu[k].y, cpu[k].y, 0, name + " y");
    Compare(gpu[k].dx, cpu[k].dx, error, name + " dx");
    Compare(gpu[k].dgamma, cpu[k].dgamma, error, name + " dgamma");
    Compare(gpu[k].dbeta, cpu[k].dbeta, 0, name + " dbeta");
    Compare(gpu[k].mean, cpu[k].mean, 0, name + " running_mean");
    Compare(gpu[k].var, cpu[k].var, 0, name + " running_var");
  }
}

// One case has a device without rows. If a masked shard has one row, this row is padding.
void TestSettings() {
  constexpr WriteMode kWrite = WriteMode::kWrite, kAdd = WriteMode::kAdd, kNull = WriteMode::kNull;
  const Activation none, relu{Function::kLeakyRelu, 0}, leaky{Function::kLeakyRelu, 0.1};
  std::vector<std::pair<std::string, Setting>> settings = {
      {"without dx", {none, false, kNull}},
      {"without dgamma", {none, false, kWrite, kWrite, false, true, false, 5, kNull}},
      {"leaky_relu onto y", {leaky, true, kWrite, kAdd}},
      {"leaky_relu without y", {leaky, true, kWrite, kNull}},
      {"prediction that keeps x", {none, true, kWrite, kWrite, true, false}},
      {"masked", {leaky, true, kWrite, kWrite, false, true, true}},
      {"masked prediction", {leaky, true, kWrite, kWrite, false, false, true}},
      {"many channels", {none, false, kWrite, kWrite, false, true, false, 300}}};
  for (WriteMode mode : {kWrite, kAdd}) {
    settings.push_back({"identity", {none, false, mode}});
    settings.push_back({"relu", {relu, false, mode}});
    settings.push_back({"identity from y", {none, true, mode}});
    settings.push_back({"leaky_relu", {leaky, true, mode}});
    settings.push_back({"leaky_relu that keeps x", {leaky, true, mode, kWrite, true}});
  }
  for (WriteMode mode : {kWrite, kAdd, kNull}) {
    settings.push_back({"prediction", {none, false, kWrite, mode, false, false}});
    settings.push_back({"leaky prediction", {leaky, false, kWrite, mode, false, false}});
  }
  // 50 rows need several blocks a channel, and have fewer terms than Compare allows.
  const std::vector<std::vector<int64_t>> rows_of_shards = {{3}, {2, 0}, {4, 1, 2}, {50}};
  for (DType dtype : test::kDTypes) {
    for (const auto& rows : rows_of_shards) {
      for (const auto& [name, setting] : settings) TestSetting(dtype, rows, setting, name);
    }
  }
}

#ifdef EMULATED_CUDA
// The allocations of a framework, which may change the thread's current device.
int pieces_taken[2], pieces_back[2];  // allocated and freed pieces of [device, pinned] memory
bool framework_is_full = false;

std::shared_ptr<void> AllocateFromFramework(const Device& device, syncbn::MemoryKind kind,
                                            size_t bytes) {
  CHECK_EQ(device.Name(), std::string("gpu(3)"));
  if (framework_is_full) throw syncbn::DeviceError("the framework has no memory");
  emulated::device = 2;
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
                                             const std::string& name = "layer") {
  return std::make_unique<syncbn::SyncBatchNorm>(
      MakeLayer(setting, 1, name), setting.masked, Device{"gpu", 3},
      syncbn::MakeCudaBackend({"gpu", 3}, AllocateFromFramework));
}

// Makes two steps of a new operator that keeps x. MXNet creates one for each imperative call.
void StepNewOperator(int64_t rows) {
  const auto op = OnGpu(kKeepsX);
  Shard shard(DType::kFloat32, rows, 0, kKeepsX);
  shard.Step(op.get(), kKeepsX);
  // TrainOnCpu makes two steps, which give the same y.
  Compare(shard.y, TrainOnCpu(DType::kFloat32, {rows}, kKeepsX)[0].y, 0, "y");
  const int taken = pieces_taken[0];
  shard.Step(op.get(), kKeepsX);
  CHECK_EQ(pieces_taken[0], taken, "memory for a second step");
}

// The framework allocates all memory, and an operator frees memory that it no longer needs.
void TestMemory() {
  for (int64_t rows : {3, 30, 300, 30}) StepNewOperator(rows);
  CHECK_EQ(emulated::allocations.load(), 0, "memory beside the framework's");
  CHECK_EQ(pieces_taken[1], 1, "pinned");
  CHECK_EQ(pieces_back[1], 0);
  CHECK_EQ(pieces_taken[0] - pieces_back[0], 2, "the workspace and the vectors are kept");
  framework_is_full = true;
  CHECK_EQ(ErrorOf([] { StepNewOperator(30); }),
           "SyncBatchNorm 'layer', forward on gpu(3): the framework has no memory");
  syncbn::Table::Get().Reset();
  framework_is_full = false;
  CHECK_EQ(emulated::device, 0);
}

// A step launches four kernels each way, and waits twice: for its sums, and for its results.
void TestLaunches() {
  for (const bool training : {true, false}) {
    Setting setting;
    setting.training = training;
    const auto op = OnGpu(setting);
    Shard shard(DType::kFloat32, 3, 0, setting);
    emulated::launches = emulated::waits = 0;
    shard.Step(op.get(), setting);
    CHECK_EQ(emulated::launches.load(), training ? 8 : 7);
    CHECK_EQ(emulated::waits.load(), 4);
  }
}

// Each CUDA call of a step fails in turn. Then the error names the layer, the device and the cause,
// the thread's current device is as before, and the first step without a failure is correct.
void TestFailures(const Setting& setting) {
  const auto op = OnGpu(setting, "norm3");
  for (int calls = 0;; ++calls) {
    Shard shard(DType::kFloat32, 3, 0, setting);
    const int device = calls % 2 == 0 ? 9 : -1;  // -1: none
    emulated::device = device;
    emulated::calls_left = calls;
    const std::string text = ErrorOf([&] { shard.Step(op.get(), setting); });
    CHECK_EQ(text == kNoError, emulated::calls_left >= 0, "call ", calls);
    emulated::calls_left = -1;
    CHECK_EQ(emulated::device, device);
    if (text == kNoError) {
      std::vector<Shard> expected = TrainOnCpu(DType::kFloat32, {3}, setting);
      Compare(shard.y, expected[0].y, 0, "y after failures");
      Compare(shard.dx, expected[0].dx, 0, "dx after failures");
      return;
    }
    CHECK(text.find("SyncBatchNorm 'norm3', ") == 0, text);
    CheckHas(text, " on gpu(3): CUDA: ");
    CheckHas(text, "failed: out of memory (cudaErrorMemoryAllocation)");
    CHECK_EQ(syncbn::Table::Get().Failure(), text);
    syncbn::Table::Get().Reset();
  }
}
#endif

}  // namespace

int main() {
  UseManagedMemory();
#ifdef EMULATED_CUDA
  TestMemory();
  TestLaunches();
  Setting prediction, from_y = kKeepsX;
  prediction.training = from_y.keeps_x = false;
  for (const Setting& setting : {Setting(), prediction, from_y, kKeepsX}) TestFailures(setting);
#endif
  TestSettings();
  return check::Result();
}
