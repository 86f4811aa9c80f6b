// Tests stores that bypass the caches: a tensor so large that its output is streamed has the same
// bits as its parts, whose outputs are not, at every alignment, and nothing is written beside it.
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "kernels/cpu/batch_norm_cpu.h"
#include "tensor.h"

namespace cpu = syncbn::cpu;
using syncbn::Activation;
using syncbn::DType;
using syncbn::Function;
using syncbn::Layout;
using syncbn::Request;
using test::Tensor;

namespace {

const std::vector<double> kMean = {0.5, -1, 3}, kScale = {2, 0.25, -1}, kOffset = {1, -0.5, 0.125};
const Activation kActivation{Function::kLeakyRelu, 0.01};

Tensor Random(DType dtype, int64_t size, int misalign, int seed) {
  std::mt19937 generator(static_cast<unsigned>(seed));
  std::uniform_real_distribution<double> uniform(-3, 3);
  Tensor tensor(dtype, size, misalign);
  for (int64_t i = 0; i < size; ++i) tensor.Set(i, uniform(generator));
  return tensor;
}

// Checks that `a` and `b` are equal and hold no NaN, and that nothing was written beside `a`.
void CheckSame(const Tensor& a, const Tensor& b, const std::string& label) {
  CHECK(a.Guarded(), label);
  int64_t different = 0;
  for (int64_t i = 0; i < a.size(); ++i) different += !(a.Get(i) == b.Get(i));
  CHECK_EQ(different, 0, label);
}

// run(layout, offset in bytes) for each outer index.
template <typename Run>
void InParts(const Layout& layout, size_t width, const Run& run) {
  const Layout part{1, layout.channels, layout.inner};
  for (int64_t o = 0; o < layout.outer; ++o)
    run(part, static_cast<size_t>(o * part.Size()) * width);
}

char* At(Tensor& tensor, size_t offset) { return static_cast<char*>(tensor.data()) + offset; }

void TestLayout(DType dtype, const Layout& layout, int misalign) {
  const std::string label = syncbn::Concat(syncbn::Name(dtype), " ", test::Describe(layout),
                                           " misaligned by ", misalign, " elements");
  Tensor x = Random(dtype, layout.Size(), misalign, 1);
  Tensor dy = Random(dtype, layout.Size(), 0, 2);
  Tensor whole(dtype, layout.Size(), misalign), parts = whole;

  const auto normalize = [&](Tensor& from, Tensor& y, const Layout& part, size_t offset) {
    cpu::Normalize({dtype, part, At(from, offset), kMean.data(), kScale.data(), kOffset.data(),
                    kActivation, Request::kWrite, At(y, offset)});
  };
  normalize(x, whole, layout, 0);
  InParts(layout, syncbn::SizeOf(dtype),
          [&](const Layout& part, size_t offset) { normalize(x, parts, part, offset); });
  CheckSame(whole, parts, label + " forward");
  Tensor in_place = x;
  normalize(in_place, in_place, layout, 0);
  CheckSame(in_place, parts, label + " forward in place");

  const auto apply = [&](Tensor& of, Tensor& dx, const Layout& part, size_t offset) {
    const syncbn::BackwardInput input{dtype, part, At(x, offset), At(of, offset), kActivation,
                                      false, kMean.data(), kScale.data(), kOffset.data()};
    cpu::BackwardApply({input, kScale.data(), kOffset.data(), kMean.data(), Request::kWrite,
                        At(dx, offset)});
  };
  apply(dy, whole, layout, 0);
  InParts(layout, syncbn::SizeOf(dtype),
          [&](const Layout& part, size_t offset) { apply(dy, parts, part, offset); });
  CheckSame(whole, parts, label + " backward");
  apply(dy, dy, layout, 0);
  CheckSame(dy, parts, label + " backward in place");
}

}  // namespace

int main() {
  // 19 MB; planes of odd lengths begin at every alignment.
  for (int misalign : {0, 1, 3}) TestLayout(DType::kFloat32, {4, 3, 400001}, misalign);
  TestLayout(DType::kFloat32, {5000, 3, 331}, 0);
  TestLayout(DType::kFloat64, {4, 3, 200003}, 1);
  return check::Result();
}
