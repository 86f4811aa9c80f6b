// Compares the layer on several emulated GPUs with the layer on as many CPUs, which is the same
// arithmetic through another backend; and tests the state that a failed CUDA call leaves behind.
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "collective/processes/communicator.h"
#include "collective/devices/group.h"
#include "cuda_runtime.h"
#include "errors.h"
#include "local_transport.h"
#include "op/backend.h"
#include "op/sync_batch_norm.h"
#include "tensor.h"

using syncbn::Activation;
using syncbn::Backend;
using syncbn::Device;
using syncbn::DType;
using syncbn::Function;
using syncbn::Request;
using syncbn::Tensor;

namespace {

constexpr int64_t kChannels = 5;

struct Setting {
  Activation activation;
  bool from_output = false;
  Request dx_request = Request::kWrite;
  Request y_request = Request::kWrite;
  bool keeps_x = false;  // if from_output: the gamma of one channel is too small for y to suffice

  syncbn::Options ToOptions(size_t devices) const {
    syncbn::Options options;
    options.num_devices = static_cast<int>(devices);
    options.timeout = 60;
    options.activation = activation;
    options.from_output = from_output;
    return options;
  }
};

constexpr int64_t kNotReconstructible = 2;  // the channel whose x backward needs if it keeps x

// Parameters, data and results of one device.
struct Shard {
  Shard(DType of, int64_t rows, int seed, bool keeps_x)
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
      y.Set(i, 0.25);
    }
    for (int64_t c = 0; c < kChannels; ++c) {
      const bool tiny = keeps_x && c == kNotReconstructible;
      gamma.Set(c, tiny ? 1e-40 : 1 + 0.1 * static_cast<double>(c));
      beta.Set(c, 0.2 * static_cast<double>(c));
      mean.Set(c, 0.5);
      var.Set(c, 2);
      dgamma.Set(c, 1);
    }
  }

  Tensor Data(test::Tensor& tensor) { return {tensor.data(), shape, dtype}; }
  Tensor Vector(test::Tensor& tensor) { return {tensor.data(), {kChannels}, vector_dtype}; }

  syncbn::ForwardTensors Forward(Request y_request) {
    return {Data(x), Vector(gamma), Vector(beta), y_request, Data(y), Vector(mean), Vector(var)};
  }

  void Step(syncbn::SyncBatchNorm* layer, const Setting& setting) {
    layer->Forward(true, Forward(setting.y_request));
    layer->Backward(Data(dy), Data(setting.from_output ? y : x),
                    {setting.dx_request, Request::kAdd, Request::kWrite, Data(dx), Vector(dgamma),
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
                         const Setting& setting) {
  const auto group = std::make_shared<syncbn::Group>("layer");
  std::vector<Shard> shards;
  for (size_t k = 0; k < rows.size(); ++k) {
    shards.emplace_back(dtype, rows[k], static_cast<int>(k), setting.keeps_x);
  }
  Parallel(static_cast<int>(rows.size()), [&](int k) {
    const Device device{type, k};
    auto backend = std::string(type) == "gpu" ? syncbn::MakeCudaBackend(device)
                                              : syncbn::MakeBackend(device);
    auto layer = std::make_unique<syncbn::SyncBatchNorm>(
        setting.ToOptions(rows.size()), device, group, std::make_shared<syncbn::RunningHistory>(),
        std::move(backend));
    emulated::Device() = 77;
    int allocations = 0;
    for (int step = 0; step < 2; ++step) {
      shards[k].Step(layer.get(), setting);
      if (rows.size() == 1 && step == 1) CHECK_EQ(emulated::Allocations(), allocations);
      allocations = emulated::Allocations();
    }
    layer.reset();
    CHECK_EQ(emulated::Device(), 77, "the thread's device was not restored");
  });
  return shards;
}

void Compare(test::Tensor& result, test::Tensor& expected, DType dtype, double error,
             const std::string& name) {
  CHECK(result.Guarded(), name);
  const double eps = dtype == DType::kFloat64 ? 0x1p-53 : 0x1p-24;
  for (int64_t i = 0; i < result.size(); ++i) {
    // Terms are below 100 here, and sums have below 400 of them.
    CHECK_NEAR(result.Get(i), expected.Get(i),
               100 * 400 * eps + test::Ulp(dtype, expected.Get(i)) + error, name, " ",
               syncbn::Name(dtype));
  }
}

void TestSetting(DType dtype, const std::vector<int64_t>& rows, const Setting& setting,
                 const std::string& name) {
  std::vector<Shard> gpu = Train("gpu", dtype, rows, setting);
  std::vector<Shard> cpu = Train("cpu", dtype, rows, setting);
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

void TestLikeCpu() {
  for (DType dtype : test::kDTypes) {
    for (const std::vector<int64_t>& rows :
         {std::vector<int64_t>{3}, std::vector<int64_t>{4, 1, 2}, std::vector<int64_t>{2, 0}}) {
      for (Request request : {Request::kWrite, Request::kAdd, Request::kNull})
        TestSetting(dtype, rows, {{}, false, request}, "plain");
    }
  }
}

void TestActivations() {
  const Activation none, relu{Function::kLeakyRelu, 0}, leaky{Function::kLeakyRelu, 0.1};
  const Activation elu{Function::kElu, 0.8};
  for (DType dtype : test::kDTypes) {
    for (Request request : {Request::kWrite, Request::kAdd}) {
      for (const std::vector<int64_t>& rows :
           {std::vector<int64_t>{3}, std::vector<int64_t>{2, 0, 3}}) {
        TestSetting(dtype, rows, {relu, false, request}, "ReLU from x");
        TestSetting(dtype, rows, {elu, false, request}, "ELU from x");
        TestSetting(dtype, rows, {none, true, request}, "identity from y");
        TestSetting(dtype, rows, {leaky, true, request}, "leaky ReLU from y");
        TestSetting(dtype, rows, {leaky, true, request, Request::kWrite, true}, "x kept");
      }
    }
    TestSetting(dtype, {3}, {leaky, true, Request::kWrite, Request::kAdd}, "leaky ReLU onto y");
    TestSetting(dtype, {3}, {leaky, true, Request::kWrite, Request::kNull}, "leaky ReLU without y");
  }
}

// A step of a new layer, as an imperative one has for each call, that keeps x.
void StepOfNewLayer(int device, int64_t rows, syncbn::Allocator allocator) {
  const Setting setting{
      {Function::kLeakyRelu, 0.1}, true, Request::kWrite, Request::kWrite, true};
  const auto group = std::make_shared<syncbn::Group>("layer");
  syncbn::SyncBatchNorm layer(setting.ToOptions(1), {"gpu", device}, group,
                              std::make_shared<syncbn::RunningHistory>(),
                              syncbn::MakeCudaBackend({"gpu", device}, allocator));
  Shard shard(DType::kFloat32, rows, 0, setting.keeps_x);
  shard.Step(&layer, setting);
  std::vector<Shard> expected = Train("cpu", DType::kFloat32, {rows}, setting);
  // Train makes two steps, of which these results are the same.
  Compare(shard.y, expected[0].y, DType::kFloat32, 0, "y");
}

void TestMemoryServesTheNextLayer() {
  StepOfNewLayer(0, 30, nullptr);
  const int allocations = emulated::Allocations();
  for (int64_t rows : {30, 20, 3}) StepOfNewLayer(0, rows, nullptr);
  CHECK_EQ(emulated::Allocations(), allocations);
  StepOfNewLayer(0, 300, nullptr);
  CHECK(emulated::Allocations() > allocations, "larger");
}

// Allocations of a framework, which may leave the thread with another device.
int pieces_taken[2], pieces_back[2];  // by kind
bool framework_is_full = false;

std::shared_ptr<void> AllocateFromFramework(const Device& device, syncbn::MemoryKind kind,
                                            size_t bytes) {
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

// All memory is the framework's. Pieces that a layer kept, or that became too small, return to it.
void TestMemoryOfTheFramework() {
  const int allocations = emulated::Allocations();
  for (int64_t rows : {3, 30, 300, 30}) StepOfNewLayer(3, rows, AllocateFromFramework);
  CHECK_EQ(emulated::Allocations(), allocations, "memory beside the framework's");
  CHECK_EQ(pieces_taken[1], 1, "pinned");
  CHECK_EQ(pieces_back[1], 0);
  CHECK_EQ(pieces_taken[0] - pieces_back[0], 2, "workspace and vectors of the lane");
  framework_is_full = true;
  CHECK_EQ(ErrorOf([] { StepOfNewLayer(3, 30, AllocateFromFramework); }),
           "SyncBatchNorm 'layer', forward on gpu(3): the framework has no memory");
  CHECK_EQ(emulated::Device(), -1);
}

// Each call of a step fails in turn. The error then names the layer, the device and the call, the
// thread has its device again, and the next step is right.
void TestFailures(const Setting& setting) {
  const auto group = std::make_shared<syncbn::Group>("norm3");
  syncbn::SyncBatchNorm layer(setting.ToOptions(1), {"gpu", 1}, group,
                              std::make_shared<syncbn::RunningHistory>(),
                              syncbn::MakeCudaBackend({"gpu", 1}));
  bool failed = true;
  for (int calls = 0; failed; ++calls) {
    Shard shard(DType::kFloat32, 3, 0, setting.keeps_x);
    emulated::Device() = 9;
    emulated::FailAfter(calls);
    const std::string text = ErrorOf([&] { shard.Step(&layer, setting); });
    emulated::FailAfter(-1);
    failed = text != kNoError;
    if (failed) {
      CHECK(text.find("SyncBatchNorm 'norm3', ") == 0, text);
      CheckHas(text, " on gpu(1): CUDA: ");
      CheckHas(text, "failed: out of memory (cudaErrorMemoryAllocation)");
      CHECK_EQ(group->Failure(), text);
      group->Reset();
    }
    CHECK(calls < 1000);
    CHECK_EQ(emulated::Device(), 9);
  }
  Shard shard(DType::kFloat32, 3, 0, setting.keeps_x);
  shard.Step(&layer, setting);
  std::vector<Shard> expected = Train("cpu", DType::kFloat32, {3}, setting);
  Compare(shard.y, expected[0].y, DType::kFloat32, 0, "y after failures");
  Compare(shard.dx, expected[0].dx, DType::kFloat32, 0, "dx after failures");
}

// A process fails before its first rendezvous, while the others wait already; in prediction, nobody
// waits, and nobody is told.
void TestOtherProcessesLearnOfAFailure() {
  const auto network = std::make_shared<Network>(2);
  syncbn::OpenCommunicator(std::make_unique<LocalTransport>(network, 0));
  syncbn::Communicator other(std::make_unique<LocalTransport>(network, 1));
  Setting setting;
  syncbn::SyncBatchNorm layer(setting.ToOptions(1), {"gpu", 1},
                              std::make_shared<syncbn::Group>("norm3"),
                              std::make_shared<syncbn::RunningHistory>(),
                              syncbn::MakeCudaBackend({"gpu", 1}));
  Shard shard(DType::kFloat32, 3, 0, false);
  for (bool training : {false, true}) {
    emulated::FailAfter(0);
    CHECK(ErrorOf([&] { layer.Forward(training, shard.Forward(Request::kWrite)); }) != kNoError);
    emulated::FailAfter(-1);
    CHECK_EQ(syncbn::TheCommunicator()->Failure().empty(), !training);
  }
  syncbn::Contribution contribution;
  contribution.key = contribution.title = "norm3";
  contribution.operation = syncbn::ReduceOperation::kSumFloat64;
  contribution.timeout_seconds = 20;
  CheckHas(ErrorOf([&] { other.AllReduce(contribution); }),
           "SyncBatchNorm 'norm3', forward on gpu(1): CUDA: ");
}

void TestNoSuchDevice() {
  CHECK_EQ(ErrorOf([] { syncbn::MakeCudaBackend({"gpu", 4}); }),
           "SyncBatchNorm on gpu(4): this process sees 4 CUDA devices");
}

void TestCpuOnlyBuild() {
  CheckHas(ErrorOf([] { syncbn::MakeBackend({"gpu", 0}); }), "GLUON_SYNCBN_CUDA=1 pip install .");
}

}  // namespace

int main() {
  TestLikeCpu();
  TestActivations();
  TestMemoryServesTheNextLayer();
  TestMemoryOfTheFramework();
  TestFailures({});
  for (bool keeps_x : {false, true}) {
    TestFailures({{Function::kLeakyRelu, 0.1}, true, Request::kWrite, Request::kWrite, keeps_x});
  }
  TestNoSuchDevice();
  TestCpuOnlyBuild();
  TestOtherProcessesLearnOfAFailure();  // from then on there are several processes
  return check::Result();
}
