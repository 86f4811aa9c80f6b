// Checks the four passes of kernels/passes.h against kernel_problem.h, for all dtypes, layouts,
// alignments, activations and ways to write. `Kernels` has functions for the passes, which return
// when the results are complete. SumError(dtype, n) bounds the error of a sum of n terms, relative
// to n times the largest term, and SumEps(dtype) is the unit roundoff (eps) of each term.
#pragma once
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "kernel_problem.h"

namespace test {

using syncbn::PassInput;

inline std::pair<Tensor, Tensor> Reduce(void (*pass)(const syncbn::ReductionPass&),
                                        const PassInput& input) {
  Tensor first(DType::kFloat64, input.layout.channels), second = first;
  pass({input, first.doubles(), second.doubles()});
  CHECK(first.GuardsAreIntact() && second.GuardsAreIntact(), Describe(input.layout));
  return {std::move(first), std::move(second)};
}

template <typename Kernels>
std::pair<Tensor, Tensor> MomentsOf(Problem& p) {
  return Reduce(Kernels::LocalMoments, {p.c.dtype, p.c.layout, p.x.data()});
}

template <typename Kernels>
void TestMoments(Problem& p) {
  const auto moments = MomentsOf<Kernels>(p);
  const double n = static_cast<double>(p.c.layout.PerChannel());
  const double error = Kernels::SumError(p.c.dtype, n);
  syncbn::ParallelFor(p.c.layout.channels, [&](int64_t c) {
    const Moments e = p.ExpectedMoments(c);
    const double far = 2 * e.farthest;  // no two elements of the channel differ by more
    CHECK_NEAR(moments.first.Get(c), e.mean, 4 * error * far + 4 * kEps64 * Size(e.mean), p.label);
    CHECK_NEAR(moments.second.Get(c), e.m2, 8 * error * n * far * far, p.label);
  });
}

inline std::string Describe(const Activation& f, bool from_output) {
  const char* const names[] = {"identity", "leaky ReLU"};
  return syncbn::Concat(names[static_cast<int>(f.function)], " with slope ", f.slope,
                        from_output ? " from y" : " from x");
}

// The tolerance includes the errors of the terms, and SumError bounds the error of adding them.
template <typename Kernels>
void TestSums(Problem& p, const PassInput& input) {
  const std::string label = p.label + " " + Describe(input.activation, input.from_output);
  const auto sums = Reduce(Kernels::BackwardSums, input);
  const double n = static_cast<double>(p.c.layout.PerChannel());
  const double error = Kernels::SumError(p.c.dtype, n), eps = Kernels::SumEps(p.c.dtype);
  syncbn::ParallelFor(p.c.layout.channels, [&](int64_t c) {
    long double dz = 0, dz_xmu = 0;
    double dz_error = 0, dz_xmu_error = 0, largest_dz = 0, largest_xmu = 0;
    p.ForEach(c, [&](int64_t i) {
      const XmuAndDz g = p.XmuAndDzOf(input, c, i, eps);
      dz += g.dz.value;
      dz_xmu += g.dz.value * g.xmu.value;
      dz_error += g.dz.error;
      dz_xmu_error += g.dz.error * Size(g.xmu.value) + Size(g.dz.value) * g.xmu.error;
      largest_dz = std::max(largest_dz, Size(g.dz.value) + g.dz.error);
      largest_xmu = std::max(largest_xmu, Size(g.xmu.value) + g.xmu.error);
    });
    CHECK_NEAR(sums.first.Get(c), dz, 2 * error * n * largest_dz + dz_error, label);
    CHECK_NEAR(sums.second.Get(c), dz_xmu, 4 * error * n * largest_dz * largest_xmu + dz_xmu_error,
               label);
  });
}

enum class Place { kApart, kOnIn, kOnDy };

// Calls apply(in, dy, mode, out), where `in` and `dy` have the elements of p.x and p.dy. Then
// checks `out`, which is one of these two or separate memory that is initially NaN.
template <typename Apply>
void TestWrite(Problem& p, WriteMode mode, Place place, const std::string& what,
               const Expected& expected, const Apply& apply) {
  const bool add = mode == WriteMode::kAdd;
  const std::string label = syncbn::Concat(p.label, " ", what, add ? " add" : "",
                                           place == Place::kApart ? "" : " in place");
  Tensor out(p.c.dtype, p.x.size(), p.c.misalign);
  for (int64_t i = 0; i < out.size() && place != Place::kApart; ++i) {
    out.Set(i, place == Place::kOnIn ? p.x.Get(i) : p.dy.Get(i));
  }
  const Tensor old = out;
  apply(place == Place::kOnIn ? out.data() : p.x.data(),
        place == Place::kOnDy ? out.data() : p.dy.data(), mode, out.data());
  CHECK(out.GuardsAreIntact(), label);
  for (int64_t i = 0; i < out.size(); ++i) {
    Value e = expected.values[i];
    if (add) {
      e.value += old.Get(i);
      e.error += expected.error_of_old * std::fabs(old.Get(i));
    }
    const double half = Ulp(p.c.dtype, static_cast<double>(e.value)) / 2;
    if (std::isnan(e.value))
      CHECK(std::isnan(out.Get(i)), label);
    else
      CHECK_NEAR(out.Get(i), e.value, e.error + half, label);
  }
}

template <typename Kernels>
void TestNormalize(Problem& p, const Activation& activation) {
  const Expected y = p.Y(activation);
  PassInput input = p.Forward(activation);
  const auto normalize = [&](const void* x, const void* /*dy*/, WriteMode mode, void* out) {
    input.in = x;
    Kernels::Normalize({input, nullptr, nullptr, mode, out});
  };
  const std::string label = "forward " + Describe(activation, false);
  TestWrite(p, WriteMode::kWrite, Place::kApart, label, y, normalize);
  TestWrite(p, WriteMode::kAdd, Place::kOnIn, label, y, normalize);
}

template <typename Kernels>
void TestBackwardApply(Problem& p, PassInput input) {
  const Expected dx = p.Dx(input);
  const auto differentiate = [&](const void* in, const void* dy, WriteMode mode, void* out) {
    input.in = in;
    input.dy = dy;
    Kernels::BackwardApply({input, p.scale_xmu.data(), p.shift.data(), mode, out});
  };
  const std::string label = "backward " + Describe(input.activation, input.from_output);
  for (auto place : {Place::kApart, Place::kOnDy})
    TestWrite(p, WriteMode::kWrite, place, label, dx, differentiate);
  TestWrite(p, WriteMode::kAdd, Place::kOnIn, label, dx, differentiate);
}

struct ActivationCase {
  Activation activation;
  bool from_output;  // backward reads y, not x
};

template <typename Kernels>
void TestCase(const Case& c, std::vector<ActivationCase> activations) {
  Problem p(c);
  TestMoments<Kernels>(p);
  activations.push_back({{}, false});
  for (const ActivationCase& each : activations) {
    const PassInput input = p.Backward(each.activation, each.from_output);
    if (!each.from_output) TestNormalize<Kernels>(p, each.activation);
    TestSums<Kernels>(p, input);
    TestBackwardApply<Kernels>(p, input);
  }
}

// A NaN or infinity affects only the moments of its own channel.
template <typename Kernels>
void TestNonFinite(DType dtype, const Layout& layout) {
  for (double bad : {double(NAN), double(INFINITY), -double(INFINITY)}) {
    Problem p({dtype, layout, 0, 0, 1});
    for (int64_t at : {int64_t{0}, layout.PerChannel() - 1}) {
      const int64_t c = layout.channels / 2;
      p.x.Set(p.Index(at / layout.inner, c, at % layout.inner), bad);
      const auto [mean, m2] = MomentsOf<Kernels>(p);
      for (int64_t i = 0; i < layout.channels; ++i) {
        CHECK_EQ(std::isfinite(mean.Get(i)), i != c, p.label);
        CHECK_EQ(std::isnan(m2.Get(i)), i == c, p.label);
      }
    }
  }
}

// An activation has the slope of its negative side at 0, and it keeps NaN.
template <typename Kernels>
void TestKink(DType dtype, const ActivationCase& f) {
  const double values[] = {0.0, -0.0, 1.0, NAN};
  Problem p({dtype, {1, 1, 4}, 0, 0, 1});
  for (int64_t i = 0; i < 4; ++i) p.x.Set(i, values[i]);
  p.mean = p.offset = {0};
  p.scale = {1};
  p.label += ", of 0, 1 and NaN";
  if (!f.from_output) TestNormalize<Kernels>(p, f.activation);
  TestBackwardApply<Kernels>(p, p.Backward(f.activation, f.from_output));
}

// float32 can hold x and dx, but not scale_xmu, which is about as large as dx / x.
template <typename Kernels>
void TestWideRange(DType dtype, double deviation) {
  for (int64_t inner : {1, 70}) {
    Problem p({dtype, {3, 5, inner}, 0, 0, deviation});
    for (size_t c = 0; c < p.shift.size(); ++c) {
      for (auto* vector : {&p.scale, &p.shift}) (*vector)[c] /= deviation;
      p.scale_xmu[c] /= deviation * deviation;
      p.mean[c] *= deviation;
    }
    p.label += syncbn::Concat(", deviation ", deviation);
    for (const Activation& activation : {Activation{}, {Function::kLeakyRelu, 3}})
      TestBackwardApply<Kernels>(p, p.Backward(activation, false));
  }
}

// Every float16 value times 1 is unchanged. Other products are rounded to nearest even.
template <typename Kernels>
void TestConversions() {
  constexpr DType dtype = DType::kFloat16;
  constexpr int64_t kValues = 65536;
  Tensor x(dtype, kValues), y(dtype, kValues);
  for (int64_t i = 0; i < kValues; ++i) x.SetHalf(i, static_cast<uint16_t>(i));
  const Vector<double> zero{0};
  // Scaling by powers of two reaches subnormals and infinity; the other scales make ties.
  for (double scale : {1.0, 0x1p-9, 0x1p9, 0x1p-3, 1.0 + 0x1p-7, 1.0 + 0x1p-10}) {
    const Vector<double> factor{scale};
    PassInput input{dtype, {1, 1, kValues}, x.data()};
    input.mean = input.offset = zero.data();
    input.scale = factor.data();
    Kernels::Normalize({input, nullptr, nullptr, WriteMode::kWrite, y.data()});
    for (int64_t i = 0; i < kValues; ++i) {
      const double expected = Round(dtype, x.Get(i) * scale), result = y.Get(i);
      const bool are_nan = std::isnan(result) && std::isnan(expected);
      CHECK(are_nan || result == expected, result, ", bits ", i, " scale ", scale);
    }
  }
}

// Returns the bits of all results of the four passes.
template <typename Kernels>
std::string Bits(DType dtype, const Layout& layout) {
  Problem p({dtype, layout, 0, 0, 1});
  const PassInput input = p.Backward({}, false);
  const auto [mean, m2] = MomentsOf<Kernels>(p);
  const auto [sum_dz, sum_dz_xmu] = Reduce(Kernels::BackwardSums, input);
  Tensor y(dtype, layout.Size()), dx = y;
  Kernels::Normalize({p.Forward({}), nullptr, nullptr, WriteMode::kWrite, y.data()});
  Kernels::BackwardApply({input, p.scale_xmu.data(), p.shift.data(), WriteMode::kWrite, dx.data()});
  return mean.Bytes() + m2.Bytes() + sum_dz.Bytes() + sum_dz_xmu.Bytes() + y.Bytes() + dx.Bytes();
}

// A thorough test, which takes minutes, combines all layouts with all activations.
template <typename Kernels>
void TestAll(const std::vector<Layout>& layouts, bool thorough = false) {
  // ReLU is the slope 0; a slope above 1 makes f steeper where z is negative.
  const ActivationCase relu{{Function::kLeakyRelu, 0}, false},
      steep{{Function::kLeakyRelu, 3}, false};
  const ActivationCase leaky_of_y{{Function::kLeakyRelu, 0.01}, true};
  const ActivationCase identity_of_y{{}, true}, steep_of_y{{Function::kLeakyRelu, 1.5}, true};
  const std::vector<ActivationCase> all = {relu, steep, leaky_of_y, identity_of_y, steep_of_y};
  for (DType dtype : kDTypes) {
    bool even = true;  // an alignment has the other pair of activations in the next layout
    for (const Layout& layout : layouts) {
      for (int misalign : {0, 1}) {
        const auto pair = even ? std::vector{relu, steep_of_y} : std::vector{steep, leaky_of_y};
        TestCase<Kernels>({dtype, layout, misalign, 0.5, 1}, thorough ? all : pair);
        even = !even;
      }
      even = !even;
      for (int misalign : {0, 1, 3}) {
        if (thorough) TestCase<Kernels>({dtype, layout, misalign, 1e4, 1}, {});
      }
    }
    for (const Layout& layout : {Layout{6, 40, 49}, Layout{3, 4, 1023}, Layout{50, 64, 1}})
      TestCase<Kernels>({dtype, layout, 1, 0, 1, true}, {relu, leaky_of_y});
    TestCase<Kernels>({dtype, {9, 33, 49}, 0, 1e4, 1}, all);
    TestCase<Kernels>({dtype, {8, 3, 5000}, 3, 1e4, 1}, all);
    for (const ActivationCase& each : {relu, steep, leaky_of_y, steep_of_y})
      TestKink<Kernels>(dtype, each);
    TestNonFinite<Kernels>(dtype, {3, 5, 7});
    TestNonFinite<Kernels>(dtype, {3, 5, 1});
    TestNonFinite<Kernels>(dtype, {4, 5, 4000});
  }
  TestCase<Kernels>({DType::kFloat64, {4, 3, 2000}, 0, 1e8, 1}, {});
  TestCase<Kernels>({DType::kFloat32, {30, 4, 3000}, 0, 100, 0.1}, {steep});
  for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
    for (double deviation : {1e-20, 1e23}) TestWideRange<Kernels>(dtype, deviation);
  }
  TestConversions<Kernels>();
  for (const Layout& layout :
       {Layout{0, 4, 5}, Layout{3, 4, 0}, Layout{0, 2, 1}, Layout{0, 8, 5000}})
    TestCase<Kernels>({DType::kFloat32, layout, 0, 0, 1}, all);
}

}  // namespace test
