// Runs the tests of kernel_tests.h with the CUDA kernels. ctest runs this program on the emulated
// GPU, and scripts/check_gpu.sh runs it on a GPU.
//
//     test_cuda_kernels          many layouts
//     test_cuda_kernels small    a few layouts, which start every kernel
//     test_cuda_kernels large    more and larger layouts, all combinations, new random data
#include <iostream>
#include <random>

#include "kernel_tests.h"
#include "kernels/cuda/cut.h"
#include "managed.h"

namespace cuda = syncbn::cuda;
using syncbn::DType;
using syncbn::Layout;
using test::CudaKernels;

namespace {

// A thread subtracts its first value from all its values before it sums them in float32. A
// channel's moments must stay precise if this first value is an outlier in one of its threads.
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

// The work of all threads covers the tensor, which may have more than 2^31 elements. Threads visit
// all their vectors of a small tensor, and else the first and last few hundred of a long walk.
template <int kWidth>
void TestWalks(const cuda::Cut& cut, const std::string& label) {
  const Layout& layout = cut.layout;
  std::vector<char> seen(layout.Size() < 1 << 22 ? static_cast<size_t>(layout.Size()) : 0);
  int64_t last = -1, visited = 0;
  for (int64_t block = 0; block < cut.tiles * cut.splits; ++block) {
    for (int thread = 0; thread < cuda::kThreads; ++thread) {
      const cuda::Work work = cut.At(static_cast<unsigned>(block), thread);
      int64_t channels[kWidth];
      cut.ChannelsOf(work, channels);
      for (cuda::Walk walk = cut.Begin(work); walk.i < walk.end;) {
        const int64_t left = (walk.end - walk.i) / cut.rows;
        if (seen.empty() && left > 4) {  // far: the walk that begins near the end
          cuda::Work rest = work;
          rest.begin = walk.i + (left - 1) * cut.rows;
          walk = cut.Begin(rest);
        }
        const cuda::Place place = cut.Take<kWidth>(&walk);
        if (place.elements == 0) continue;
        CHECK_EQ(place.at % kWidth, 0, label);
        for (int j = 0; j < kWidth; ++j) {
          if ((place.elements >> j & 1) == 0) continue;
          const int64_t at = place.at + j, plane = at / layout.inner;
          last = std::max(last, at);
          CHECK_EQ(plane % layout.channels, channels[cut.columns ? j : 0], label, " at ", at);
          ++visited;
          if (!seen.empty()) CHECK(++seen[static_cast<size_t>(at)] == 1, label, " at ", at);
        }
      }
    }
  }
  CHECK_EQ(last + 1, layout.Size(), label);
  if (!seen.empty()) CHECK_EQ(visited, layout.Size(), label);
}

void TestCut(const Layout& layout, int bytes, bool aligned) {
  const cuda::Cut cut = cuda::MakeCut(layout, bytes, aligned, 132);
  const std::string label = syncbn::Concat(test::Describe(layout), " of ", bytes, " bytes");
  switch (cut.width) {
    case 1: TestWalks<1>(cut, label); break;
    case 2: TestWalks<2>(cut, label); break;
    case 4: TestWalks<4>(cut, label); break;
    case 8: TestWalks<8>(cut, label); break;
    default: CHECK(false, label);
  }
  const int64_t most_partials = cuda::kBlocksEach * 132 * cuda::kMaxTileChannels;
  CHECK(cut.splits == 1 || cut.splits * layout.channels <= most_partials, label);
}

}  // namespace

int main(int arguments, char** values) {
  const std::string form = arguments > 1 ? values[1] : "";
  test::UseManagedMemory();
  for (int bytes : {2, 4, 8}) {
    for (bool aligned : {false, true}) {
      for (const Layout& layout :
           {Layout{3, 4, (1 << 28) - 5}, Layout{3, 4, 1 << 28}, Layout{(1 << 28) + 3, 8, 1},
            Layout{1 << 20, 2048, 49}, Layout{40, 9000, 4}, Layout{6, 40, 196}, Layout{9, 33, 49},
            Layout{3, 5, 15 * 15}, Layout{7, 3, 33 * 33}, Layout{2, 5, 65 * 65},
            Layout{3, 3, 129 * 129}, Layout{1, 3, 513 * 513}})
        TestCut(layout, bytes, aligned);
    }
  }
  TestOutlier();
  TestSameBitsInEveryRun({6, 40, 49});
  std::vector<Layout> layouts = {{3, 5, 7},    {2, 3, 64},   {9000, 8, 1}, {4, 6, 1023},
                                 {2, 3, 1040}, {5, 48, 196}, {3, 16, 225},  // 15 x 15
                                 {2, 3, 1089}, {3, 2, 4225}};               // 33 x 33, 65 x 65
  const std::vector<Layout> more = {{1, 1, 1},      {5, 3, 1},     {20011, 3, 1}, {7, 1024, 1},
                                    {3, 1025, 1},   {2, 2048, 1},  {37, 17, 3},   {1, 2, 40001},
                                    {9, 40, 49},    {530, 128, 1}, {60, 3, 700},  {2, 2, 50000},
                                    {300, 19, 129}, {40, 2, 127},  {50, 2, 4},    {2, 1, 16641},
                                    {1, 1, 263169}};  // 129 x 129, 513 x 513
  const std::vector<Layout> for_a_gpu = {{4, 3, 25},     {2, 5, 1000}, {3, 4, 1023}, {8, 3, 40000},
                                         {1, 2, 300001}, {50, 64, 1},  {9000, 3, 1}, {28800, 64, 1},
                                         {7, 1025, 1},   {6, 40, 49},  {4, 9000, 4}};
  if (form != "small") layouts.insert(layouts.end(), more.begin(), more.end());
  if (form == "large") {
    std::cout << "seed " << (test::seed = std::random_device()()) << std::endl;
    layouts.insert(layouts.end(), for_a_gpu.begin(), for_a_gpu.end());
    for (const Layout& layout :
         {Layout{4, 64, 16641}, Layout{66564, 256, 1}, Layout{8, 2048, 49}}) {
      for (DType dtype : {DType::kFloat32, DType::kFloat16})
        test::TestCase<CudaKernels>({dtype, layout, 0, 3, 1}, {});
    }
    for (const Layout& layout : layouts) TestSameBitsInEveryRun(layout);
    TestSameBitsInEveryRun({4, 64, 16641});
  }
  test::TestCase<CudaKernels>({DType::kFloat32, {2, 0, 5}, 0, 0, 1}, {});
  test::TestAll<CudaKernels>(layouts, form == "large");
  return check::Result();
}
