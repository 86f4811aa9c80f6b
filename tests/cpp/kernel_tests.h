// The four kernels against a loop in long double, over dtypes, layouts, alignments and both ways to
// write. `Kernels` are those of the CPU or of CUDA: static functions as in batch_norm_cpu.h, and
// `SumError(dtype, n)`, which bounds the error of a sum of n terms, relative to n times the largest.
//
// Tolerances are error bounds, not measurements: eps of the arithmetic times the sizes of the terms
// that are added, times the error of a sum, plus half a unit of the result.
#pragma once
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "core/layout.h"
#include "tensor.h"

namespace test {

using syncbn::DType;
using syncbn::Layout;

constexpr double kEps64 = 0x1p-53;

struct Case {
  DType dtype;
  Layout layout;
  int misalign;
  double center, deviation;
};

struct Channel {
  long double mean = 0, m2 = 0, sum_dy = 0, sum_dy_xmu = 0;
  double farthest = 0, largest_dy = 0;  // of x from the mean
};

struct Problem {
  Case c;
  Tensor x, dy;
  std::vector<double> mean, a, b, d;
  std::string label;

  explicit Problem(const Case& of)
      : c(of),
        x(of.dtype, of.layout.Size(), of.misalign),
        dy(of.dtype, of.layout.Size(), of.misalign),
        label(syncbn::Concat(syncbn::Name(of.dtype), " (", of.layout.outer, ", ",
                             of.layout.channels, ", ", of.layout.inner, ") misaligned by ",
                             of.misalign, ", about ", of.center)) {
    std::mt19937 generator(7);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < x.size(); ++i) {
      x.Set(i, c.center + c.deviation * normal(generator));
      dy.Set(i, normal(generator));
    }
    for (int64_t i = 0; i < c.layout.channels; ++i) {
      mean.push_back(c.center + 0.1 * normal(generator));
      a.push_back(normal(generator));
      b.push_back(normal(generator));
      d.push_back(normal(generator));
    }
  }

  int64_t Index(int64_t outer, int64_t channel, int64_t inner) const {
    return (outer * c.layout.channels + channel) * c.layout.inner + inner;
  }

  template <typename Visit>
  void ForEach(int64_t channel, const Visit& visit) const {
    for (int64_t o = 0; o < c.layout.outer; ++o)
      for (int64_t i = 0; i < c.layout.inner; ++i) visit(Index(o, channel, i));
  }

  Channel Expected(int64_t channel) const {
    Channel e;
    ForEach(channel, [&](int64_t i) { e.mean += x.Get(i); });
    if (c.layout.PerChannel() > 0) e.mean /= c.layout.PerChannel();
    ForEach(channel, [&](int64_t i) {
      const long double deviation = x.Get(i) - e.mean;
      e.m2 += deviation * deviation;
      e.sum_dy += dy.Get(i);
      e.sum_dy_xmu += dy.Get(i) * (static_cast<long double>(x.Get(i)) - mean[channel]);
      e.farthest = std::max(e.farthest, static_cast<double>(std::fabs(deviation)));
      e.largest_dy = std::max(e.largest_dy, std::fabs(dy.Get(i)));
    });
    return e;
  }
};

// Poisoned, but for the bytes that have to be zero.
template <typename Kernels>
std::vector<double> Workspace(DType dtype, const Layout& layout) {
  std::vector<double> workspace(Kernels::WorkspaceBytes(dtype, layout) / 8 + 1, NAN);
  std::fill_n(workspace.begin(), Kernels::kWorkspaceZeros / 8, 0.0);
  return workspace;
}

template <typename Kernels>
void CheckZeros(const std::vector<double>& workspace, const std::string& label) {
  for (int64_t i = 0; i < Kernels::kWorkspaceZeros / 8; ++i) CHECK_EQ(workspace[i], 0.0, label);
}

template <typename Kernels>
void TestReductions(Problem& p) {
  const int64_t channels = p.c.layout.channels;
  std::vector<double> workspace = Workspace<Kernels>(p.c.dtype, p.c.layout);
  std::vector<double> mean(channels, NAN), m2 = mean, sum_dy = mean, sum_dy_xmu = mean;
  Kernels::LocalMoments(p.c.dtype, p.x.data(), p.c.layout, workspace.data(), mean.data(), m2.data());
  Kernels::BackwardSums(p.c.dtype, p.x.data(), p.dy.data(), p.c.layout, p.mean.data(),
                    workspace.data(), sum_dy.data(), sum_dy_xmu.data());
  CheckZeros<Kernels>(workspace, p.label);
  const double n = static_cast<double>(p.c.layout.PerChannel());
  const double error = Kernels::SumError(p.c.dtype, n);
  for (int64_t c = 0; c < channels; ++c) {
    const Channel e = p.Expected(c);
    const double far = 2 * e.farthest;  // bounds |x - first value|
    const double off = far + std::fabs(static_cast<double>(e.mean) - p.mean[c]);
    CHECK_NEAR(mean[c], e.mean, 4 * error * far + 4 * kEps64 * std::fabs(mean[c]), p.label);
    CHECK_NEAR(m2[c], e.m2, 8 * error * n * far * far, p.label);
    CHECK_NEAR(sum_dy[c], e.sum_dy, 2 * error * n * e.largest_dy, p.label);
    CHECK_NEAR(sum_dy_xmu[c], e.sum_dy_xmu, 4 * error * n * e.largest_dy * off, p.label);
  }
}

// The output starts as NaN where it is to be overwritten.
template <typename Kernels>
void TestApply(Problem& p, bool backward, bool add, bool in_place) {
  Tensor out(p.c.dtype, p.x.size(), p.c.misalign);
  for (int64_t i = 0; i < out.size(); ++i) {
    if (in_place) out.Set(i, p.x.Get(i));
    else if (add) out.Set(i, 0.25 * (i % 13));
  }
  const Tensor old = out;
  const void* x = in_place ? out.data() : p.x.data();
  if (backward)
    Kernels::BackwardApply(p.c.dtype, x, p.dy.data(), p.c.layout, p.mean.data(), p.a.data(),
                       p.b.data(), p.d.data(), add, out.data());
  else
    Kernels::Normalize(p.c.dtype, x, p.c.layout, p.mean.data(), p.b.data(), p.d.data(), add,
                       out.data());
  CHECK(out.Guarded(), p.label);
  const double eps = p.c.dtype == DType::kFloat64 ? kEps64 : 0x1p-24;
  for (int64_t c = 0; c < p.c.layout.channels; ++c) {
    p.ForEach(c, [&](int64_t i) {
      const double centered = p.b[c] * (p.x.Get(i) - p.mean[c]);
      const double gradient = backward ? p.a[c] * p.dy.Get(i) : 0;
      const double before = add ? old.Get(i) : 0;
      const double split = std::fabs(p.b[c] * p.mean[c]) * eps;  // what float32 loses of the mean
      const double terms = std::fabs(centered) + std::fabs(gradient) + std::fabs(before) +
                           std::fabs(p.d[c]) + split;
      const double expected = centered + p.d[c] + gradient + before;
      CHECK_NEAR(out.Get(i), expected, 8 * eps * terms + Ulp(p.c.dtype, expected) / 2,
                 p.label, backward ? " backward" : " forward", add ? " add" : "",
                 in_place ? " in place" : "");
    });
  }
}

template <typename Kernels>
void TestCase(const Case& c) {
  Problem problem(c);
  TestReductions<Kernels>(problem);
  for (bool backward : {false, true}) {
    for (bool in_place : {false, true}) {
      TestApply<Kernels>(problem, backward, false, in_place);
      TestApply<Kernels>(problem, backward, true, in_place);
    }
  }
}

template <typename Kernels>
void TestNonFinite(DType dtype, const Layout& layout) {
  for (double bad : {double(NAN), double(INFINITY), -double(INFINITY)}) {
    Problem p({dtype, layout, 0, 0, 1});
    for (int64_t at : {int64_t{0}, layout.PerChannel() - 1}) {
      const int64_t c = layout.channels / 2;
      p.x.Set(p.Index(at / layout.inner, c, at % layout.inner), bad);
      std::vector<double> workspace = Workspace<Kernels>(dtype, layout);
      std::vector<double> mean(layout.channels), m2(layout.channels);
      Kernels::LocalMoments(dtype, p.x.data(), layout, workspace.data(), mean.data(), m2.data());
      for (int64_t i = 0; i < layout.channels; ++i) {
        CHECK_EQ(std::isfinite(mean[i]), i != c, p.label);
        CHECK_EQ(std::isnan(m2[i]), i == c, p.label);
      }
    }
  }
}

// Every value of a 16-bit type passes through unchanged, and sums are rounded to nearest even.
template <typename Kernels>
void TestConversions(DType dtype) {
  constexpr int64_t kValues = 65536;
  Tensor x(dtype, kValues), y(dtype, kValues);
  for (int64_t i = 0; i < kValues; ++i) x.SetBits(i, static_cast<uint16_t>(i));
  const double zero = 0;
  // Scaling by powers of two reaches subnormals and infinity; the other scale makes ties.
  for (double scale : {1.0, 0x1p-9, 0x1p9, 0x1p-3, 1.0 + 0x1p-7, 1.0 + 0x1p-10}) {
    Kernels::Normalize(dtype, x.data(), {1, 1, kValues}, &zero, &scale, &zero, false,
                       y.data());
    for (int64_t i = 0; i < kValues; ++i) {
      const double expected = Round(dtype, x.Get(i) * scale);
      if (dtype == DType::kBfloat16 && std::fabs(x.Get(i) * scale) < 0x1p-126)
        continue;  // float32's own subnormals: their rounding comes first
      if (std::isnan(expected))
        CHECK(std::isnan(y.Get(i)), "bits ", i, " scale ", scale);
      else
        CHECK_EQ(y.Get(i), expected, "bits ", i, " scale ", scale);
    }
  }
}

template <typename Kernels>
void TestAll(const std::vector<Layout>& layouts) {
  const std::vector<DType> dtypes = {DType::kFloat32, DType::kFloat64, DType::kFloat16,
                                     DType::kBfloat16};
  for (DType dtype : dtypes) {
    for (const Layout& layout : layouts) {
      for (int misalign : {0, 1}) TestCase<Kernels>({dtype, layout, misalign, 0.5, 1});
    }
    TestCase<Kernels>({dtype, {9, 33, 49}, 0, 1e4, 1});
    TestCase<Kernels>({dtype, {8, 3, 5000}, 3, 1e4, 1});
    TestNonFinite<Kernels>(dtype, {3, 5, 7});
    TestNonFinite<Kernels>(dtype, {3, 5, 1});
    TestNonFinite<Kernels>(dtype, {4, 5, 4000});
  }
  TestCase<Kernels>({DType::kFloat64, {4, 3, 2000}, 0, 1e8, 1});
  TestCase<Kernels>({DType::kFloat32, {30, 4, 3000}, 0, 100, 0.1});
  TestConversions<Kernels>(DType::kFloat16);
  TestConversions<Kernels>(DType::kBfloat16);
  for (const Layout& layout : {Layout{0, 4, 5}, Layout{3, 4, 0}, Layout{0, 2, 1}})
    TestCase<Kernels>({DType::kFloat32, layout, 0, 0, 1});
}

}  // namespace test
