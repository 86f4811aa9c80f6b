// Makes random tensors, and checks that two hold the same values.
// Who uses it: tests that compare one way of computing with another.
#pragma once
#include <random>
#include <string>

#include "check.h"
#include "tensor.h"

namespace test {

inline Tensor Random(syncbn::DType dtype, int64_t size, int misalign, int seed) {
  std::mt19937 generator(static_cast<unsigned>(seed));
  std::uniform_real_distribution<double> uniform(-3, 3);
  Tensor tensor(dtype, size, misalign);
  for (int64_t i = 0; i < size; ++i) tensor.Set(i, uniform(generator));
  return tensor;
}

// Checks that `a` and `b` are equal and hold no NaN, and that nothing was written beside `a`.
inline void CheckSame(const Tensor& a, const Tensor& b, const std::string& label) {
  CHECK(a.Guarded(), label);
  int64_t different = 0;
  for (int64_t i = 0; i < a.size(); ++i) different += !(a.Get(i) == b.Get(i));
  CHECK_EQ(different, 0, label);
}

}  // namespace test
