// Runs kernel_tests.h for the CPU kernels, and tests that three threads and one thread compute the
// same bits. CMake registers the test once for each instruction set.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "kernel_tests.h"
#include "kernels/passes.h"

namespace cpu = syncbn::cpu;
using syncbn::DType;
using syncbn::Layout;

namespace {

struct CpuKernels {
  // All sums are float64.
  static double SumError(DType /*dtype*/, double n) { return test::kEps64 * n; }
  static double SumEps(DType /*dtype*/) { return test::kEps64; }
  static constexpr auto LocalMoments = cpu::LocalMoments;
  static constexpr auto Normalize = cpu::Normalize;
  static constexpr auto BackwardSums = cpu::BackwardSums;
  static constexpr auto BackwardApply = cpu::BackwardApply;
};

std::string AllBits() {
  std::string bits = test::Bits<CpuKernels>(DType::kFloat32, {6, 64, 900, 16});
  for (DType dtype : test::kDTypes) {
    for (const Layout& layout :
         {Layout{1, 1, 1}, Layout{4, 3, 25}, Layout{2, 5, 1000}, Layout{8, 3, 40000},
          Layout{50, 64, 1}, Layout{9000, 3, 1}, Layout{2, 2048, 1}, Layout{6, 40, 49}}) {
      bits += test::Bits<CpuKernels>(dtype, layout);
    }
  }
  return bits;
}

// A forked process has no workers and computes on one thread.
void TestSameBits() {
  CHECK_EQ(syncbn::NumThreads(), 3);
  const std::string bits = AllBits();
  const pid_t child = fork();
  if (child == 0) _exit(syncbn::NumThreads() == 1 && AllBits() == bits ? 0 : 1);
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

// Outputs of 8 MiB or more bypass the caches. Planes of odd lengths begin at every alignment. Rows
// of 128 channels are whole SIMD vectors, but rows of 130 channels are not.
void TestStreamedStores() {
  const test::ActivationCase leaky{{syncbn::Function::kLeakyRelu, 0.01}, false};
  for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
    const int64_t elements = (10 << 20) / static_cast<int64_t>(syncbn::SizeOf(dtype));
    test::TestCase<CpuKernels>({dtype, {4, 3, elements / 12 | 1}, 1, 0.5, 1}, {leaky});
    test::TestCase<CpuKernels>({dtype, {elements / 130, 130, 1}, 0, 0.5, 1}, {leaky});
  }
  test::TestCase<CpuKernels>({DType::kFloat64, {10000, 128, 1}, 0, 0.5, 1}, {leaky});
}

// An array may wrap memory of another library whose address is no multiple of the element's size.
void TestAnOddAddress() {
  test::Problem p({DType::kFloat32, {1, 1, 3 << 20}, 0, 0, 1});
  test::Tensor y(DType::kFloat32, p.x.size());
  std::string odd(y.Bytes().size() + 1, '\0');
  for (void* out : {y.data(), static_cast<void*>(odd.data() + 1)}) {
    cpu::Normalize({p.Forward({}), nullptr, nullptr, test::WriteMode::kWrite, out});
  }
  CHECK(odd.substr(1) == y.Bytes());
}

// oneDNN's layouts with blocks of channels. Odd sizes leave a part of a vector of two pixels, and
// begin blocks at addresses to which no vector can be streamed.
void TestBlocks() {
  const test::ActivationCase relu{{syncbn::Function::kLeakyRelu, 0}, false};
  const test::ActivationCase leaky_of_y{{syncbn::Function::kLeakyRelu, 0.01}, true};
  for (int64_t block : {8, 16}) {
    for (const Layout& shape : {Layout{3, 48, 25}, Layout{5, 16, 1}, Layout{1, 32, 4097},
                                Layout{2, 16, 90001}, Layout{2, 16, 90000}, Layout{70, 16, 49}}) {
      Layout layout = shape;
      layout.block = block;
      for (int misalign : {0, 1}) {
        test::TestCase<CpuKernels>({DType::kFloat32, layout, misalign, 0.5, 1}, {relu, leaky_of_y});
      }
    }
    test::TestNonFinite<CpuKernels>(DType::kFloat32, {3, 32, 7, block});
    test::TestCase<CpuKernels>({DType::kFloat32, {0, 16, 5, block}, 0, 0, 1}, {relu});
  }
}

void TestChangesOfBlocks() {
  const Layout shape{3, 32, 21};
  for (int64_t from : {1, 8, 16}) {
    for (int64_t to : {1, 8, 16}) {
      if (from == to) continue;
      test::Problem p({DType::kFloat32, {3, 32, 21, from}, 0, 0, 1});
      test::Problem other({DType::kFloat32, {3, 32, 21, to}, 0, 0, 1});
      cpu::ChangeBlock(p.c.layout, static_cast<const float*>(p.x.data()), to,
                       static_cast<float*>(other.x.data()));
      CHECK(other.x.GuardsAreIntact());
      for (int64_t i = 0; i < shape.Size(); ++i) {
        const int64_t o = i / (32 * 21), c = i / 21 % 32, inner = i % 21;
        CHECK_EQ(other.x.Get(other.Index(o, c, inner)), p.x.Get(p.Index(o, c, inner)), from, to);
      }
    }
  }
}

}  // namespace

int main() {
  setenv("OMP_NUM_THREADS", "3", 1);
  TestSameBits();
#if !defined(__SANITIZE_THREAD__)  // TestSameBits is enough for the thread sanitizer
  std::cout << cpu::InstructionSet() << std::endl;
  if (cpu::InstructionSet() != std::string("generic")) TestStreamedStores();
#if !defined(__SANITIZE_ADDRESS__)  // its build also checks alignment
  TestAnOddAddress();
#endif
  TestBlocks();
  TestChangesOfBlocks();
  const std::vector<Layout> layouts = {
      {1, 1, 1},    {3, 5, 7},     {2, 3, 64},   {2, 3, 65},   {5, 3, 1},     {20011, 3, 1},
      {7, 1024, 1}, {3, 1025, 1},  {2, 2048, 1}, {37, 17, 3},  {4, 6, 1023},  {1, 2, 40001},
      {9, 33, 49},  {530, 130, 1}, {60, 3, 700}, {3, 2000, 2}, {1, 70000, 1}, {12, 40, 127}};
  test::TestAll<CpuKernels>(layouts);
#endif
  return check::Result();
}
