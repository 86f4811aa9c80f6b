// Tests the CUDA kernels by kernel_tests.h. ctest runs them on the emulated GPU, and
// scripts/check_gpu.sh on a GPU.
//
//     test_cuda_kernels          all tests that take less than minutes in emulation
//     test_cuda_kernels small    some layouts, enough to start every kernel
//     test_cuda_kernels large    all combinations, on new data, with tensors for a GPU
#include <iostream>
#include <random>

#include "kernel_tests.h"
#include "kernels/cuda/cut.h"
#include "kernels/cuda/passes.h"
#include "staging.h"

namespace cuda = syncbn::cuda;
using syncbn::DType;
using syncbn::Layout;
using syncbn::WriteMode;
using test::Staging;
using test::Tensor;

namespace {

struct CudaKernels {
  static constexpr int64_t kWorkspaceZeros = cuda::kWorkspaceZeros;
  static int64_t WorkspaceBytes(const Layout& /*layout*/) { return cuda::WorkspaceBytes(); }
  // Sums of four vectors are in the data's arithmetic, and sums of these in double.
  static double SumError(DType dtype, double n) {
    const double eps = dtype == DType::kFloat64 ? 0x1p-53 : 0x1p-24;
    return eps * std::min(n, 4.0 * 8) + 0x1p-53 * n;
  }
  static double SumEps(DType dtype) { return test::EpsOf(dtype); }
  static void LocalMoments(const syncbn::ReductionPass& pass, void* workspace) {
    Staging on_gpu(pass.dtype, pass.layout);
    cuda::LocalMoments(
        {Staged(&on_gpu, pass), on_gpu.Result(pass.first), on_gpu.Result(pass.second)},
        Scratch(&on_gpu, workspace), nullptr);
  }
  static void BackwardSums(const syncbn::ReductionPass& pass, void* workspace) {
    Staging on_gpu(pass.dtype, pass.layout);
    cuda::BackwardSums(
        {Staged(&on_gpu, pass), on_gpu.Result(pass.first), on_gpu.Result(pass.second)},
        Scratch(&on_gpu, workspace), nullptr);
  }
  static void Normalize(const syncbn::ElementwisePass& pass) {
    Staging on_gpu(pass.dtype, pass.layout);
    syncbn::ElementwisePass staged = pass;
    static_cast<syncbn::PassInput&>(staged) = Staged(&on_gpu, pass);
    staged.out = on_gpu.Out(pass.out);
    cuda::Normalize(staged, nullptr);
  }
  static void BackwardApply(const syncbn::ElementwisePass& pass) {
    Staging on_gpu(pass.dtype, pass.layout);
    cuda::BackwardApply({Staged(&on_gpu, pass), on_gpu.Vector(pass.scale_xmu),
                         on_gpu.Vector(pass.shift), pass.mode, on_gpu.Out(pass.out)},
                        nullptr);
  }

 private:
  static void* Scratch(Staging* on_gpu, void* workspace) {
    return on_gpu->Workspace(workspace, cuda::WorkspaceBytes());
  }
  static syncbn::PassInput Staged(Staging* on_gpu, syncbn::PassInput input) {
    input.in = on_gpu->In(input.in);
    if (input.dy != nullptr) input.dy = on_gpu->In(input.dy);
    for (const double** vector : {&input.mean, &input.scale, &input.offset}) {
      *vector = on_gpu->Vector(*vector);
    }
    return input;
  }
};

// The first value of a thread, which its float32 sums subtract, may be far from all others. The
// moments of other threads and channels must keep their precision.
void TestOutlier() {
  for (const Layout& layout : {Layout{8, 2, 20000}, Layout{60000, 4, 1}}) {
    test::Problem p({DType::kFloat32, layout, 0, 1e4, 1});
    for (int64_t c = 0; c < layout.channels; ++c) p.x.Set(c * layout.inner, 0);
    const auto [mean, m2] = test::MomentsOf<CudaKernels>(p);
    for (int64_t c = 0; c < layout.channels; ++c) {
      const test::Moments e = p.ExpectedMoments(c);
      CHECK_NEAR(mean.Get(c), e.mean, 1e-6, p.label);
      CHECK_NEAR(m2.Get(c), e.m2, 1e-4 * static_cast<double>(e.m2), p.label);
    }
  }
}

void TestSameBitsInEveryRun(const Layout& layout) {
  for (DType dtype : test::kDTypes) {
    const std::string first = test::Bits<CudaKernels>(dtype, layout);
    for (int run = 0; run < 3; ++run)
      CHECK(test::Bits<CudaKernels>(dtype, layout) == first, test::Describe(layout));
  }
}

// A tensor with one value, and maybe more than 2^31 elements. Sums of the tensor count the elements
// that were read, and sums of the output count the elements that were written.
void TestManyElements(const Layout& layout) {
  constexpr DType dtype = DType::kFloat16;
  constexpr double kValue = 1 + 0x3cp-10;  // 0x3c3c
  const std::string label = "a value in " + test::Describe(layout);
  const size_t bytes = 2 * static_cast<size_t>(layout.Size());
  char *x = nullptr, *y = nullptr;
  if (cudaMalloc(reinterpret_cast<void**>(&x), bytes) != cudaSuccess ||
      cudaMalloc(reinterpret_cast<void**>(&y), bytes) != cudaSuccess) {
    cudaGetLastError();
    test::Check(cudaFree(x));
    std::cout << label << ": left out, for want of " << 2 * bytes << " bytes\n";
    return;
  }
  test::Check(cudaMemsetAsync(x, 0x3c, bytes, nullptr));
  test::Check(cudaMemsetAsync(y, 0xff, bytes, nullptr));
  std::vector<double> mean(layout.channels, -1), two(layout.channels, 2), one(layout.channels, 1);
  {
    Staging on_gpu(dtype, layout);
    const auto pass =
        test::NormalizePass(dtype, layout, x, on_gpu.Vector(mean.data()), on_gpu.Vector(two.data()),
                            on_gpu.Vector(one.data()), WriteMode::kWrite, y);
    cuda::Normalize(pass, nullptr);
  }
  const double right = test::Round(dtype, (kValue + 1) * 2 + 1);
  const auto sums = test::Reduce<CudaKernels>(
      layout, label, [&](double* sum, double* sum_product, void* workspace) {
        Staging on_gpu(dtype, layout);
        const syncbn::PassInput input{dtype,   layout, x, y, {}, false, on_gpu.Vector(mean.data()),
                                      nullptr, nullptr};
        void* const scratch = on_gpu.Workspace(workspace, cuda::WorkspaceBytes());
        cuda::BackwardSums({input, on_gpu.Result(sum), on_gpu.Result(sum_product)}, scratch,
                           nullptr);
      });
  const double count = static_cast<double>(layout.PerChannel());
  for (int64_t c = 0; c < layout.channels; ++c) {
    CHECK_NEAR(sums.first.Get(c), count * right, 1e-6 * count * right, label);
    CHECK_NEAR(sums.second.Get(c), count * right * (kValue + 1), 2e-6 * count * right, label);
  }
  test::Check(cudaFree(x));
  test::Check(cudaFree(y));
}

// Copies convert float32 and float64 numbers to each other, and replace or add them.
void TestCopies() {
  Tensor floats(DType::kFloat32, 1000), doubles(DType::kFloat64, 1000);
  for (int64_t i = 0; i < 1000; ++i) floats.Set(i, static_cast<double>(i));
  {
    Staging on_gpu(DType::kFloat32, {});
    void* const from = on_gpu.Written(floats.data(), floats.Bits().size());
    void* const to = on_gpu.Written(doubles.data(), doubles.Bits().size());
    cuda::CopyVectors({{from, to, 1000, false, true, false}}, nullptr);
    cuda::CopyVectors({{to, from, 1000, true, false, true}}, nullptr);
  }
  for (int64_t i = 0; i < 1000; ++i) {
    CHECK_EQ(doubles.Get(i), static_cast<double>(i));
    CHECK_EQ(floats.Get(i), static_cast<double>(2 * i));
  }
}

// The work of all threads covers a tensor of any size.
void TestCut(const Layout& layout, int bytes, bool aligned) {
  const cuda::Cut cut = cuda::MakeCut(layout, bytes, aligned, 132);
  const std::string label = syncbn::Concat(test::Describe(layout), " of ", bytes, " bytes");
  int64_t vectors = 0, last = -1;
  for (int64_t block = 0; block < cut.tiles * cut.splits; ++block) {
    for (int thread = 0; thread < cuda::kThreads; ++thread) {
      const cuda::Work work = cut.At(static_cast<unsigned>(block), thread);
      if (work.begin >= work.end) continue;
      const int64_t count = syncbn::CeilDiv(work.end - work.begin, cut.rows);
      vectors += count;
      last = std::max(last, cut.OffsetOf(work, work.begin + (count - 1) * cut.rows));
    }
  }
  CHECK_EQ(vectors * cut.width, layout.Size(), label);
  CHECK_EQ(last + cut.width, layout.Size(), label);
  CHECK(cut.tile_channels <= cuda::kMaxTileChannels || cut.splits == 1, label);
}

#ifdef EMULATED_CUDA
int Launches() {
  int sum = 0;
  for (const auto& kernel : emulated::Launches()) sum += kernel.second;
  return sum;
}

// A pass is one launch, and reads each element of its tensors once.
void TestBytes(const Layout& layout) {
  for (DType dtype : test::kDTypes) {
    for (int misalign : {0, 1}) {
      test::Problem p({dtype, layout, misalign, 0, 1});
      Tensor out(dtype, layout.Size(), misalign);
      const int64_t bytes = layout.Size() * static_cast<int64_t>(syncbn::SizeOf(dtype));
      const auto check = [&](const char* pass, int tensors, const auto& run) {
        const int64_t bytes_before = emulated::bytes_read;
        const int launches_before = Launches();
        run();
        CHECK_EQ(emulated::bytes_read - bytes_before, tensors * bytes, p.label, " ", pass);
        CHECK_EQ(Launches() - launches_before, 1, p.label, " ", pass);
      };
      const syncbn::PassInput input = p.From({syncbn::Function::kLeakyRelu, 0.1}, false);
      check("moments", 1, [&] { test::MomentsOf<CudaKernels>(p); });
      check("sums", 2, [&] { test::SumsOf<CudaKernels>(input, p.label); });
      for (WriteMode mode : {WriteMode::kWrite, WriteMode::kAdd}) {
        const int old = mode == WriteMode::kAdd;
        syncbn::ElementwisePass pass;
        static_cast<syncbn::PassInput&>(pass) = input;
        pass.scale_xmu = p.scale_xmu.data();
        pass.shift = p.shift.data();
        pass.mode = mode;
        pass.out = out.data();
        check("normalize", 1 + old, [&] { CudaKernels::Normalize(pass); });
        check("apply", 2 + old, [&] { CudaKernels::BackwardApply(pass); });
      }
    }
  }
}

void TestEveryKernelRan() {
  for (const auto& kernel : emulated::Launches())
    CHECK(kernel.second > 0, kernel.first, " never ran");
}
#endif

}  // namespace

int main(int arguments, char** values) {
  const std::string form = arguments > 1 ? values[1] : "";
  test::Check(cudaSetDevice(0));
  TestCopies();
  for (int bytes : {2, 4, 8}) {
    for (bool aligned : {false, true}) {
      for (const Layout& layout :
           {Layout{3, 4, (1 << 28) - 5}, Layout{3, 4, 1 << 28}, Layout{(1 << 28) + 3, 8, 1},
            Layout{1 << 20, 2048, 49}, Layout{40, 9000, 4}, Layout{6, 40, 196}, Layout{9, 33, 49}})
        TestCut(layout, bytes, aligned);
    }
  }
  TestOutlier();
  TestSameBitsInEveryRun({6, 40, 49});
  TestManyElements({3, 4, 10007});
  TestManyElements({4001, 8, 1});
  std::vector<Layout> layouts = {{3, 5, 7},    {2, 3, 64},   {9000, 8, 1}, {4, 6, 1023},
                                 {2, 3, 1040}, {5, 48, 196}, {3, 16, 225}};
  const std::vector<Layout> more = {{1, 1, 1},      {5, 3, 1},     {20011, 3, 1}, {7, 1024, 1},
                                    {3, 1025, 1},   {2, 2048, 1},  {37, 17, 3},   {1, 2, 40001},
                                    {9, 40, 49},    {530, 128, 1}, {60, 3, 700},  {2, 2, 50000},
                                    {300, 19, 129}, {40, 2, 127},  {50, 2, 4}};
  const std::vector<Layout> for_a_gpu = {{4, 3, 25},     {2, 5, 1000}, {3, 4, 1023}, {8, 3, 40000},
                                         {1, 2, 300001}, {50, 64, 1},  {9000, 3, 1}, {28800, 64, 1},
                                         {7, 1025, 1},   {6, 40, 49},  {4, 9000, 4}};
  if (form != "small") layouts.insert(layouts.end(), more.begin(), more.end());
  if (form == "large") {
    std::cout << "seed " << (test::Seed() = std::random_device()()) << std::endl;
    layouts.insert(layouts.end(), for_a_gpu.begin(), for_a_gpu.end());
    for (const Layout& layout :
         {Layout{4, 64, 16641}, Layout{66564, 256, 1}, Layout{8, 2048, 49}}) {
      for (DType dtype : {DType::kFloat32, DType::kFloat16})
        test::TestCase<CudaKernels>({dtype, layout, 0, 3, 1}, {});
    }
    for (const Layout& layout : layouts) TestSameBitsInEveryRun(layout);
    TestSameBitsInEveryRun({4, 64, 16641});
    TestManyElements({3, 4, (1 << 28) - 5});
    TestManyElements({(1 << 28) + 3, 8, 1});
  }
  test::TestCase<CudaKernels>({DType::kFloat32, {2, 0, 5}, 0, 0, 1}, {});
  test::TestAll<CudaKernels>(layouts, form == "large");
#ifdef EMULATED_CUDA
  for (const Layout& layout : {Layout{9, 40, 49}, Layout{530, 128, 1}, Layout{3, 5, 1040},
                               Layout{300, 19, 129}, Layout{3, 5, 7}})
    TestBytes(layout);
  TestEveryKernelRan();
#endif
  return check::Result();
}
