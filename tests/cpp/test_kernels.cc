// The four CPU kernels against a loop in long double, over dtypes, layouts, alignments and both
// ways to write. CMake registers this once for each instruction set.
//
// Tolerances are error bounds, not measurements: eps of the arithmetic times the sizes of the terms
// that are added, times their number where a sum has that many, plus half a unit of the result.
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "core/layout.h"
#include "kernels/cpu/batch_norm_cpu.h"
#include "tensor.h"

using syncbn::DType;
using syncbn::Layout;
using test::Tensor;
namespace cpu = syncbn::cpu;

namespace {

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

void TestReductions(Problem& p) {
  const int64_t channels = p.c.layout.channels;
  std::vector<double> workspace(cpu::WorkspaceBytes(p.c.layout) / 8 + 1, NAN);
  std::vector<double> mean(channels, NAN), m2 = mean, sum_dy = mean, sum_dy_xmu = mean;
  cpu::LocalMoments(p.c.dtype, p.x.data(), p.c.layout, workspace.data(), mean.data(), m2.data());
  cpu::BackwardSums(p.c.dtype, p.x.data(), p.dy.data(), p.c.layout, p.mean.data(),
                    workspace.data(), sum_dy.data(), sum_dy_xmu.data());
  const double n = static_cast<double>(p.c.layout.PerChannel());
  for (int64_t c = 0; c < channels; ++c) {
    const Channel e = p.Expected(c);
    const double far = 2 * e.farthest;  // bounds |x - first value|
    const double off = far + std::fabs(static_cast<double>(e.mean) - p.mean[c]);
    CHECK_NEAR(mean[c], e.mean, kEps64 * (4 * n * far + 4 * std::fabs(mean[c])), p.label);
    CHECK_NEAR(m2[c], e.m2, kEps64 * 8 * n * n * far * far, p.label);
    CHECK_NEAR(sum_dy[c], e.sum_dy, kEps64 * 2 * n * n * e.largest_dy, p.label);
    CHECK_NEAR(sum_dy_xmu[c], e.sum_dy_xmu, kEps64 * 4 * n * n * e.largest_dy * off, p.label);
  }
}

// The output starts as NaN where it is to be overwritten.
void TestApply(Problem& p, bool backward, cpu::Write write, bool in_place) {
  Tensor out(p.c.dtype, p.x.size(), p.c.misalign);
  const bool add = write == cpu::Write::kAdd;
  for (int64_t i = 0; i < out.size(); ++i) {
    if (in_place) out.Set(i, p.x.Get(i));
    else if (add) out.Set(i, 0.25 * (i % 13));
  }
  const Tensor old = out;
  const void* x = in_place ? out.data() : p.x.data();
  if (backward)
    cpu::BackwardApply(p.c.dtype, x, p.dy.data(), p.c.layout, p.mean.data(), p.a.data(),
                       p.b.data(), p.d.data(), write, out.data());
  else
    cpu::Normalize(p.c.dtype, x, p.c.layout, p.mean.data(), p.b.data(), p.d.data(), write,
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
      CHECK_NEAR(out.Get(i), expected, 8 * eps * terms + test::Ulp(p.c.dtype, expected) / 2,
                 p.label, backward ? " backward" : " forward", add ? " add" : "",
                 in_place ? " in place" : "");
    });
  }
}

void TestCase(const Case& c) {
  Problem problem(c);
  TestReductions(problem);
  for (bool backward : {false, true}) {
    for (bool in_place : {false, true}) {
      TestApply(problem, backward, cpu::Write::kAssign, in_place);
      TestApply(problem, backward, cpu::Write::kAdd, in_place);
    }
  }
}

void TestNonFinite(DType dtype, const Layout& layout) {
  for (double bad : {double(NAN), double(INFINITY), -double(INFINITY)}) {
    Problem p({dtype, layout, 0, 0, 1});
    for (int64_t at : {int64_t{0}, layout.PerChannel() - 1}) {
      const int64_t c = layout.channels / 2;
      p.x.Set(p.Index(at / layout.inner, c, at % layout.inner), bad);
      std::vector<double> workspace(cpu::WorkspaceBytes(layout) / 8);
      std::vector<double> mean(layout.channels), m2(layout.channels);
      cpu::LocalMoments(dtype, p.x.data(), layout, workspace.data(), mean.data(), m2.data());
      for (int64_t i = 0; i < layout.channels; ++i) {
        CHECK_EQ(std::isfinite(mean[i]), i != c, p.label);
        CHECK_EQ(std::isnan(m2[i]), i == c, p.label);
      }
    }
  }
}

// Every value of a 16-bit type passes through unchanged, and sums are rounded to nearest even.
void TestConversions(DType dtype) {
  constexpr int64_t kValues = 65536;
  Tensor x(dtype, kValues), y(dtype, kValues);
  for (int64_t i = 0; i < kValues; ++i) x.SetBits(i, static_cast<uint16_t>(i));
  const double zero = 0;
  // Scaling by powers of two reaches subnormals and infinity; the other scale makes ties.
  for (double scale : {1.0, 0x1p-9, 0x1p9, 0x1p-3, 1.0 + 0x1p-7, 1.0 + 0x1p-10}) {
    cpu::Normalize(dtype, x.data(), {1, 1, kValues}, &zero, &scale, &zero, cpu::Write::kAssign,
                   y.data());
    for (int64_t i = 0; i < kValues; ++i) {
      const double expected = test::Round(dtype, x.Get(i) * scale);
      if (dtype == DType::kBfloat16 && std::fabs(x.Get(i) * scale) < 0x1p-126)
        continue;  // float32's own subnormals: their rounding comes first
      if (std::isnan(expected))
        CHECK(std::isnan(y.Get(i)), "bits ", i, " scale ", scale);
      else
        CHECK_EQ(y.Get(i), expected, "bits ", i, " scale ", scale);
    }
  }
}

void TestEmpty(const Layout& layout) {
  Problem p({DType::kFloat32, layout, 0, 0, 1});
  CHECK_EQ(cpu::WorkspaceBytes(layout), 0);
  TestCase(p.c);
}

}  // namespace

int main() {
  std::cout << cpu::InstructionSet() << std::endl;
  const std::vector<DType> dtypes = {DType::kFloat32, DType::kFloat64, DType::kFloat16,
                                     DType::kBfloat16};
  const std::vector<Layout> layouts = {
      {1, 1, 1},    {3, 5, 7},     {2, 3, 64},     {2, 3, 65},   {5, 3, 1},    {20011, 3, 1},
      {7, 1024, 1}, {3, 1025, 1},  {2, 2048, 1},   {37, 17, 3},  {4, 6, 1023}, {1, 2, 40001},
      {9, 33, 49},  {530, 130, 1}, {60, 3, 700},   {3, 2000, 2}, {1, 70000, 1}, {12, 40, 127}};
  for (DType dtype : dtypes) {
    for (const Layout& layout : layouts) {
      for (int misalign : {0, 1}) TestCase({dtype, layout, misalign, 0.5, 1});
    }
    TestCase({dtype, {9, 33, 49}, 0, 1e4, 1});
    TestCase({dtype, {8, 3, 5000}, 3, 1e4, 1});
    TestNonFinite(dtype, {3, 5, 7});
    TestNonFinite(dtype, {3, 5, 1});
    TestNonFinite(dtype, {4, 5, 4000});
  }
  TestCase({DType::kFloat64, {4, 3, 2000}, 0, 1e8, 1});
  TestCase({DType::kFloat32, {30, 4, 3000}, 0, 100, 0.1});
  TestConversions(DType::kFloat16);
  TestConversions(DType::kBfloat16);
  for (const Layout& layout : {Layout{0, 4, 5}, Layout{3, 4, 0}, Layout{0, 2, 1}})
    TestEmpty(layout);
  return check::Result();
}
