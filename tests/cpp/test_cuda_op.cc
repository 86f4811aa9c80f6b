// The layer on several emulated GPUs against the layer on as many CPUs: the same arithmetic through
// the other backend. And what a failing CUDA call leaves behind.
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collective/group.h"
#include "core/error.h"
#include "cuda_runtime.h"
#include "op/cuda/backend_cuda.h"
#include "op/sync_batch_norm.h"
#include "tensor.h"

using syncbn::Backend;
using syncbn::Device;
using syncbn::DType;
using syncbn::Request;
using syncbn::Tensor;

namespace {

constexpr int64_t kChannels = 5;

// Parameters, data and results of one device.
struct Shard {
  Shard(DType of, int64_t rows, int seed)
      : dtype(of),
        shape{rows, kChannels, 7},
        x(dtype, rows * kChannels * 7),
        dy(dtype, x.size()),
        y(dtype, x.size()),
        dx(dtype, x.size()) {
    std::mt19937 generator(static_cast<unsigned>(seed));
    std::normal_distribution<double> normal(3, 2);
    for (int64_t i = 0; i < x.size(); ++i) {
      x.Set(i, normal(generator));
      dy.Set(i, normal(generator));
      dx.Set(i, 0.5);
    }
    for (int64_t c = 0; c < kChannels; ++c) {
      gamma.Set(c, 1 + 0.1 * static_cast<double>(c));
      beta.Set(c, 0.2 * static_cast<double>(c));
      mean.Set(c, 0.5);
      var.Set(c, 2);
      dgamma.Set(c, 1);
    }
  }

  Tensor Data(test::Tensor& tensor) { return {tensor.data(), shape, dtype}; }
  Tensor Vector(test::Tensor& tensor) { return {tensor.data(), {kChannels}, vector_dtype}; }

  void Step(syncbn::SyncBatchNorm* layer, Request dx_request) {
    layer->Forward(true, Data(x), Vector(gamma), Vector(beta), Request::kWrite, Data(y),
                   Vector(mean), Vector(var));
    layer->Backward(Data(dy), Data(x), Vector(gamma),
                    {dx_request, Request::kAdd, Request::kWrite, Data(dx), Vector(dgamma),
                     Vector(dbeta)});
  }

  DType dtype;
  DType vector_dtype = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  std::vector<int64_t> shape;
  test::Tensor x, dy, y, dx;
  test::Tensor gamma{vector_dtype, kChannels}, beta{vector_dtype, kChannels};
  test::Tensor mean{vector_dtype, kChannels}, var{vector_dtype, kChannels};
  test::Tensor dgamma{vector_dtype, kChannels}, dbeta{vector_dtype, kChannels};
};

// Two training steps on `rows.size()` devices, a thread each.
std::vector<Shard> Train(const char* type, DType dtype, const std::vector<int64_t>& rows,
                         Request dx_request) {
  const auto group = std::make_shared<syncbn::Group>("layer");
  syncbn::Options options;
  options.num_devices = static_cast<int>(rows.size());
  options.timeout = 60;
  std::vector<Shard> shards;
  for (size_t k = 0; k < rows.size(); ++k) shards.emplace_back(dtype, rows[k], static_cast<int>(k));
  std::vector<std::thread> threads;
  for (size_t k = 0; k < rows.size(); ++k) {
    threads.emplace_back([&, k] {
      const Device device{type, static_cast<int>(k)};
      auto backend = std::string(type) == "gpu" ? syncbn::MakeCudaBackend(device)
                                                : syncbn::MakeBackend(device);
      syncbn::SyncBatchNorm layer(options, device, group, std::move(backend));
      emulated::Device() = 77;
      int allocations = 0;
      for (int step = 0; step < 2; ++step) {
        shards[k].Step(&layer, dx_request);
        if (rows.size() == 1 && step == 1) CHECK_EQ(emulated::Allocations(), allocations);
        allocations = emulated::Allocations();
      }
      CHECK_EQ(emulated::Device(), 77, "the thread's device was not restored");
    });
  }
  for (std::thread& thread : threads) thread.join();
  return shards;
}

void Compare(test::Tensor& result, test::Tensor& expected, DType dtype, const char* name) {
  CHECK(result.Guarded(), name);
  const double eps = dtype == DType::kFloat64 ? 0x1p-53 : 0x1p-24;
  for (int64_t i = 0; i < result.size(); ++i) {
    // Terms are below 100 here, and sums have below 400 of them.
    CHECK_NEAR(result.Get(i), expected.Get(i),
               100 * 400 * eps + test::Ulp(dtype, expected.Get(i)), name, " ", syncbn::Name(dtype));
  }
}

void TestLikeCpu() {
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBfloat16}) {
    for (const std::vector<int64_t>& rows :
         {std::vector<int64_t>{3}, std::vector<int64_t>{4, 1, 2}, std::vector<int64_t>{2, 0}}) {
      for (Request request : {Request::kWrite, Request::kAdd, Request::kNull}) {
        std::vector<Shard> gpu = Train("gpu", dtype, rows, request);
        std::vector<Shard> cpu = Train("cpu", dtype, rows, request);
        for (size_t k = 0; k < rows.size(); ++k) {
          Compare(gpu[k].y, cpu[k].y, dtype, "y");
          Compare(gpu[k].dx, cpu[k].dx, dtype, "dx");
          const DType vector = gpu[k].vector_dtype;
          Compare(gpu[k].dgamma, cpu[k].dgamma, vector, "dgamma");
          Compare(gpu[k].dbeta, cpu[k].dbeta, vector, "dbeta");
          Compare(gpu[k].mean, cpu[k].mean, vector, "running_mean");
          Compare(gpu[k].var, cpu[k].var, vector, "running_var");
        }
      }
    }
  }
}

// Every call of a step fails in turn: each time the error names the layer, the device and a call,
// the thread has its device back, and the next step is right.
void TestFailures() {
  const auto group = std::make_shared<syncbn::Group>("norm3");
  syncbn::Options options;
  syncbn::SyncBatchNorm layer(options, {"gpu", 1}, group, syncbn::MakeCudaBackend({"gpu", 1}));
  bool failed = true;
  for (int calls = 0; failed; ++calls) {
    Shard shard(DType::kFloat32, 3, 0);
    std::string text;
    emulated::Device() = 9;
    emulated::FailAfter(calls);
    try {
      shard.Step(&layer, Request::kWrite);
    } catch (const syncbn::Error& error) {
      text = error.what();
    }
    emulated::FailAfter(-1);
    failed = !text.empty();
    if (failed) {
      CHECK(text.find("SyncBatchNorm 'norm3', ") == 0, text);
      CHECK(text.find(" on gpu(1): CUDA: ") != std::string::npos, text);
      CHECK(text.find("failed: out of memory (cudaErrorMemoryAllocation)") != std::string::npos,
            text);
      CHECK_EQ(group->Failure(), text);
      group->Reset();
    }
    CHECK(calls < 1000);
    CHECK_EQ(emulated::Device(), 9);
  }
  Shard shard(DType::kFloat32, 3, 0);
  shard.Step(&layer, Request::kWrite);
  std::vector<Shard> expected = Train("cpu", DType::kFloat32, {3}, Request::kWrite);
  Compare(shard.y, expected[0].y, DType::kFloat32, "y after failures");
}

void TestNoSuchDevice() {
  try {
    syncbn::MakeCudaBackend({"gpu", 4});
    CHECK(false, "gpu(4) of 4");
  } catch (const syncbn::Error& error) {
    CHECK_EQ(std::string(error.what()),
             "SyncBatchNorm on gpu(4): this process sees 4 CUDA devices");
  }
}

void TestCpuOnlyBuild() {
  try {
    syncbn::MakeBackend({"gpu", 0});
    CHECK(false, "a GPU without CUDA");
  } catch (const syncbn::Error& error) {
    CHECK(std::string(error.what()).find("GLUON_SYNCBN_CUDA=1 pip install .") != std::string::npos);
  }
}

}  // namespace

int main() {
  TestLikeCpu();
  TestFailures();
  TestNoSuchDevice();
  TestCpuOnlyBuild();
  return check::Result();
}
