// Compares the layer on several devices of one GPU with the layer on as many CPUs, which has the
// same arithmetic and another backend. ctest runs it on the emulated GPU, and scripts/check_gpu.sh
// on a GPU. test_cuda_failures.cc has the tests that need emulation.
#include <dlfcn.h>

#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "layer_shard.h"
#include "staging.h"

using namespace test;

namespace {

// Memory that lasts until the process ends.
std::shared_ptr<void> Allocate(const Device&, syncbn::MemoryKind kind, size_t bytes) {
  void* memory = nullptr;
  const bool pinned = kind == syncbn::MemoryKind::kPinned;
  test::Check(pinned ? cudaHostAlloc(&memory, bytes, cudaHostAllocMapped)
                     : cudaMalloc(&memory, bytes));
  return std::shared_ptr<void>(memory, [](void*) {});
}

// Like TrainOnCpu. The exchange has several devices, and all of them compute on gpu(0).
std::vector<Shard> TrainOnGpu(DType dtype, const std::vector<int64_t>& rows,
                              const Setting& setting) {
  const auto shared = std::make_shared<syncbn::Layer>("layer");
  std::vector<Shard> shards = MakeShards(dtype, rows, setting);
  Parallel(static_cast<int>(rows.size()), [&](int k) {
    test::Check(cudaSetDevice(0));
    const auto layer = MakeLayer(setting, rows.size(), {"gpu", k}, shared,
                                 syncbn::MakeCudaBackend({"gpu", 0}, Allocate));
    for (int step = 0; step < 2; ++step) {
      Staging on_gpu(dtype, {});
      shards[k].Step(layer.get(), setting, [&](test::Tensor& tensor) {
        return on_gpu.Written(tensor.data(), tensor.Bits().size());
      });
    }
  });
  return shards;
}

void TestSetting(DType dtype, const std::vector<int64_t>& rows, const Setting& setting,
                 const std::string& name) {
  std::vector<Shard> gpu = TrainOnGpu(dtype, rows, setting);
  std::vector<Shard> cpu = TrainOnCpu(dtype, rows, setting);
  // The y that backward reads may be rounded to different neighbours. Its x_hat, which is
  // multiplied by less than 10, then differs by as much.
  const double error = setting.from_output ? 10 * test::Ulp(dtype, 4) : 0;
  for (size_t k = 0; k < rows.size(); ++k) {
    Compare(gpu[k].y, cpu[k].y, dtype, 0, name + " y");
    Compare(gpu[k].dx, cpu[k].dx, dtype, error, name + " dx");
    const DType vector = gpu[k].vector_dtype;
    Compare(gpu[k].dgamma, cpu[k].dgamma, vector, error, name + " dgamma");
    Compare(gpu[k].dbeta, cpu[k].dbeta, vector, 0, name + " dbeta");
    Compare(gpu[k].mean, cpu[k].mean, vector, 0, name + " running_mean");
    Compare(gpu[k].var, cpu[k].var, vector, 0, name + " running_var");
  }
}

// The second device may have no row, and a masked shard may have only padding.
void TestSettings() {
  constexpr WriteMode kWrite = WriteMode::kWrite, kAdd = WriteMode::kAdd, kNull = WriteMode::kNull;
  const Activation none, relu{Function::kLeakyRelu, 0}, leaky{Function::kLeakyRelu, 0.1};
  std::vector<std::pair<std::string, Setting>> settings = {
      {"without dx", {none, false, kNull}},
      {"leaky_relu onto y", {leaky, true, kWrite, kAdd}},
      {"leaky_relu without y", {leaky, true, kWrite, kNull}},
      {"prediction that keeps x", {none, true, kWrite, kWrite, true, false}},
      {"masked", {leaky, true, kWrite, kWrite, false, true, true}},
      {"masked prediction", {leaky, true, kWrite, kWrite, false, false, true}}};
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
  const std::vector<std::vector<int64_t>> rows_of_shards = {{3}, {2, 0}, {4, 1, 2}};
  for (DType dtype : test::kDTypes) {
    for (const auto& rows : rows_of_shards) {
      for (const auto& [name, setting] : settings) TestSetting(dtype, rows, setting, name);
    }
  }
}

// Returns the driver's context of the calling thread, or null.
void* CurrentContext() {
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY);
  const auto get = reinterpret_cast<int (*)(void**)>(dlsym(driver, "cuCtxGetCurrent"));
  void* context = nullptr;
  CHECK_EQ(get(&context), 0);
  return context;
}

// After a call the thread has its previous device, or none. A machine with one GPU has no other
// device.
void TestCurrentDevice() {
  int devices = 0;
  test::Check(cudaGetDeviceCount(&devices));
  for (int device : {-1, 0, devices - 1}) {
    const Setting setting;
    const auto layer = MakeLayer(setting, 1, {"gpu", 0}, std::make_shared<syncbn::Layer>("layer"),
                                 syncbn::MakeCudaBackend({"gpu", 0}, Allocate));
    Shard shard(DType::kFloat32, 3, 0, false);
    {
      Staging on_gpu(DType::kFloat32, {});
      const auto step = [&] {
        shard.Step(layer.get(), setting, [&](test::Tensor& tensor) {
          return on_gpu.Written(tensor.data(), tensor.Bits().size());
        });
      };
      step();  // stages the tensors, so that the thread below calls CUDA only in the layer
      std::thread([&] {
        if (device >= 0) {
          test::Check(cudaSetDevice(device));
          test::Check(cudaFree(nullptr));  // older runtimes make the context at the first use
        }
        void* const before = CurrentContext();
        CHECK_EQ(before == nullptr, device < 0, "the context of a new thread");
        step();
        CHECK_EQ(CurrentContext(), before, "device ", device);
      }).join();
    }
    std::vector<Shard> expected = TrainOnCpu(DType::kFloat32, {3}, setting);
    Compare(shard.y, expected[0].y, DType::kFloat32, 0, "y");
  }
}

}  // namespace

int main() {
  test::Check(cudaSetDevice(0));
  TestCurrentDevice();
  TestSettings();
  return check::Result();
}
