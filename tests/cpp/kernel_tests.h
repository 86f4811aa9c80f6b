// The kernels against kernel_problem.h, over dtypes, layouts, alignments, activations and ways to
// write. `Kernels` are those of the CPU or of CUDA: static functions as in batch_norm_cpu.h, and of
// the sums `SumError(dtype, n)`, which bounds the error of n terms, relative to n times the
// largest, and `SumEps(dtype)`, the eps of each term.
#pragma once
#include <cmath>
#include <vector>

#include "check.h"
#include "kernel_problem.h"

namespace test {

using syncbn::BackwardInput;

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
void TestMoments(Problem& p) {
  const int64_t channels = p.c.layout.channels;
  std::vector<double> workspace = Workspace<Kernels>(p.c.dtype, p.c.layout);
  std::vector<double> mean(channels, NAN), m2 = mean;
  Kernels::LocalMoments({p.c.dtype, p.c.layout, p.x.data(), mean.data(), m2.data()},
                        workspace.data());
  CheckZeros<Kernels>(workspace, p.label);
  const double n = static_cast<double>(p.c.layout.PerChannel());
  const double error = Kernels::SumError(p.c.dtype, n);
  for (int64_t c = 0; c < channels; ++c) {
    const Moments e = p.ExpectedMoments(c);
    const double far = 2 * e.farthest;  // bounds |x - first value|
    CHECK_NEAR(mean[c], e.mean, 4 * error * far + 4 * kEps64 * std::fabs(mean[c]), p.label);
    CHECK_NEAR(m2[c], e.m2, 8 * error * n * far * far, p.label);
  }
}

inline std::string Describe(const Activation& f, bool from_output) {
  const char* const names[] = {"identity", "leaky ReLU", "ELU"};
  return syncbn::Concat(names[static_cast<int>(f.function)], " with slope ", f.slope,
                        from_output ? " from y" : " from x");
}

// Sums err as sums of the largest terms, and by the errors of their terms.
template <typename Kernels>
void TestSums(Problem& p, const BackwardInput& input) {
  const std::string what = Describe(input.activation, input.from_output);
  const int64_t channels = p.c.layout.channels;
  std::vector<double> workspace = Workspace<Kernels>(p.c.dtype, p.c.layout);
  std::vector<double> sum_dz(channels, NAN), sum_dz_u = sum_dz;
  Kernels::BackwardSums({input, sum_dz.data(), sum_dz_u.data()}, workspace.data());
  CheckZeros<Kernels>(workspace, p.label);
  const double n = static_cast<double>(p.c.layout.PerChannel());
  const double error = Kernels::SumError(p.c.dtype, n), eps = Kernels::SumEps(p.c.dtype);
  for (int64_t c = 0; c < channels; ++c) {
    long double dz = 0, dz_u = 0;
    double dz_error = 0, dz_u_error = 0, largest_dz = 0, largest_u = 0;
    p.ForEach(c, [&](int64_t i) {
      const Gradient g = p.Unwound(input, c, i, eps);
      dz += g.dz.value;
      dz_u += g.dz.value * g.u.value;
      dz_error += g.dz.error;
      dz_u_error += g.dz.error * Size(g.u.value) + Size(g.dz.value) * g.u.error;
      largest_dz = std::max(largest_dz, Size(g.dz.value) + g.dz.error);
      largest_u = std::max(largest_u, Size(g.u.value) + g.u.error);
    });
    CHECK_NEAR(sum_dz[c], dz, 2 * error * n * largest_dz + dz_error, p.label, " ", what);
    CHECK_NEAR(sum_dz_u[c], dz_u, 4 * error * n * largest_dz * largest_u + dz_u_error, p.label, " ",
               what);
  }
}

// The ways to write a tensor.
struct Way {
  bool add;
  enum { kApart, kOnFirst, kOnDy } place;

  Request request() const { return add ? Request::kAdd : Request::kWrite; }
};

// Runs apply(t, dy, out) on memory that lies as `way` says; the output starts as NaN where it is to
// be overwritten. Then checks it against expected(channel, element, what was there).
template <typename Apply, typename Expected>
void TestWrite(Problem& p, const Way& way, const std::string& what, const Apply& apply,
               const Expected& expected) {
  Tensor out(p.c.dtype, p.x.size(), p.c.misalign);
  for (int64_t i = 0; i < out.size(); ++i) {
    if (way.place == Way::kOnFirst) out.Set(i, p.x.Get(i));
    else if (way.place == Way::kOnDy) out.Set(i, p.dy.Get(i));
    else if (way.add) out.Set(i, 0.25 * (i % 13));
  }
  const Tensor old = out;
  apply(way.place == Way::kOnFirst ? out.data() : p.x.data(),
        way.place == Way::kOnDy ? out.data() : p.dy.data(), out.data());
  CHECK(out.Guarded(), p.label, " ", what);
  for (int64_t c = 0; c < p.c.layout.channels; ++c) {
    p.ForEach(c, [&](int64_t i) {
      const Value e = expected(c, i, way.add ? old.Get(i) : 0.0);
      const double half = Ulp(p.c.dtype, static_cast<double>(e.value)) / 2;
      CHECK_NEAR(out.Get(i), e.value, e.error + half, p.label, " ", what, way.add ? " add" : "",
                 way.place == Way::kApart ? "" : " in place");
    });
  }
}

template <typename Kernels>
void TestNormalize(Problem& p, const Activation& activation, const Way& way) {
  TestWrite(
      p, way, "forward " + Describe(activation, false),
      [&](const void* x, const void* /*dy*/, void* y) {
        Kernels::Normalize({p.c.dtype, p.c.layout, x, p.mean.data(), p.scale.data(),
                            p.offset.data(), activation, way.request(), y});
      },
      [&](int64_t c, int64_t i, double old) {
        const Value y = p.Y(activation, c, i);
        const double added = EpsOf(p.c.dtype) * (Size(y.value) + std::fabs(old));
        return Value{y.value + old, y.error + added};
      });
}

template <typename Kernels>
void TestBackwardApply(Problem& p, BackwardInput input, const Way& way) {
  TestWrite(
      p, way, "backward " + Describe(input.activation, input.from_output),
      [&](const void* t, const void* dy, void* dx) {
        input.t = t;
        input.dy = dy;
        Kernels::BackwardApply({input, p.a.data(), p.b.data(), p.d.data(), way.request(), dx});
      },
      [&](int64_t c, int64_t i, double old) { return p.Dx(input, c, i, old); });
}

template <typename Kernels>
void TestPlain(Problem& p) {
  const BackwardInput plain = p.From({}, false);
  TestMoments<Kernels>(p);
  TestSums<Kernels>(p, plain);
  for (bool add : {false, true}) {
    for (auto place : {Way::kApart, Way::kOnFirst}) {
      TestNormalize<Kernels>(p, {}, {add, place});
      TestBackwardApply<Kernels>(p, plain, {add, place});
    }
  }
  TestBackwardApply<Kernels>(p, plain, {true, Way::kOnDy});
}

struct Fusion {
  Activation activation;
  bool from_output;
};

template <typename Kernels>
void TestFusion(Problem& p, const Fusion& fusion) {
  const BackwardInput input = p.From(fusion.activation, fusion.from_output);
  if (!fusion.from_output) {
    TestNormalize<Kernels>(p, fusion.activation, {false, Way::kApart});
    TestNormalize<Kernels>(p, fusion.activation, {true, Way::kOnFirst});
  }
  TestSums<Kernels>(p, input);
  TestBackwardApply<Kernels>(p, input, {false, Way::kOnDy});
  TestBackwardApply<Kernels>(p, input, {true, Way::kOnFirst});
}

template <typename Kernels>
void TestCase(const Case& c, const std::vector<Fusion>& fusions) {
  Problem problem(c);
  TestPlain<Kernels>(problem);
  for (const Fusion& fusion : fusions) TestFusion<Kernels>(problem, fusion);
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
      Kernels::LocalMoments({dtype, layout, p.x.data(), mean.data(), m2.data()}, workspace.data());
      for (int64_t i = 0; i < layout.channels; ++i) {
        CHECK_EQ(std::isfinite(mean[i]), i != c, p.label);
        CHECK_EQ(std::isnan(m2[i]), i == c, p.label);
      }
    }
  }
}

// At 0 the slope is that of the negative side, and NaN stays, through an activation, too.
template <typename Kernels>
void TestKink(DType dtype, const Fusion& fusion) {
  const std::vector<double> values = {0.0, -0.0, 1.0, NAN};
  const Layout layout{1, 1, static_cast<int64_t>(values.size())};
  const double zero = 0, one = 1;
  Tensor t(dtype, layout.inner), dy(dtype, layout.inner), y(dtype, layout.inner);
  for (int64_t i = 0; i < layout.inner; ++i) {
    t.Set(i, values[i]);
    dy.Set(i, 1);
  }
  const BackwardInput input{dtype, layout, t.data(), dy.data(), fusion.activation,
                            fusion.from_output, &zero, &one, &zero};
  const std::string what =
      syncbn::Name(dtype) + " " + Describe(fusion.activation, fusion.from_output);
  Kernels::Normalize({dtype, layout, t.data(), &zero, &one, &zero, fusion.activation,
                      Request::kWrite, y.data()});
  for (int64_t i = 0; i < 3; ++i) CHECK_EQ(y.Get(i), values[i], what);
  CHECK(std::isnan(y.Get(3)), what);
  Kernels::BackwardApply({input, &one, &zero, &zero, Request::kWrite, y.data()});
  const double slope = fusion.activation.slope, half = Ulp(dtype, slope) / 2;
  const double error = half + 4 * EpsOf(dtype) * slope;
  for (int64_t i = 0; i < 2; ++i) CHECK_NEAR(y.Get(i), slope, error, what);
  CHECK_EQ(y.Get(2), 1.0, what);
  CHECK(std::isnan(y.Get(3)), what);
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
    Kernels::Normalize({dtype, {1, 1, kValues}, x.data(), &zero, &scale, &zero, Activation{},
                        Request::kWrite, y.data()});
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
  // ReLU is the slope 0; a slope above 1 makes f steeper where z is negative.
  const Fusion relu{{Function::kLeakyRelu, 0}, false}, steep{{Function::kLeakyRelu, 3}, false};
  const Fusion leaky_of_y{{Function::kLeakyRelu, 0.01}, true}, elu{{Function::kElu, 0.7}, false};
  const Fusion identity_of_y{{}, true}, steep_of_y{{Function::kLeakyRelu, 1.5}, true};
  const std::vector<Fusion> all = {relu, steep, elu, leaky_of_y, identity_of_y, steep_of_y};
  for (DType dtype : dtypes) {
    // Each layout meets every kind, half of them at either alignment, alternately.
    size_t turn = 0;
    for (const Layout& layout : layouts) {
      for (int misalign : {0, 1}) {
        const bool first = (turn + static_cast<size_t>(misalign)) % 2 == 0;
        TestCase<Kernels>({dtype, layout, misalign, 0.5, 1},
                          first ? std::vector<Fusion>{relu, steep_of_y}
                                : std::vector<Fusion>{elu, leaky_of_y});
      }
      ++turn;
    }
    TestCase<Kernels>({dtype, {9, 33, 49}, 0, 1e4, 1}, all);
    TestCase<Kernels>({dtype, {8, 3, 5000}, 3, 1e4, 1}, all);
    for (const Fusion& fusion : {relu, steep, elu, leaky_of_y, steep_of_y})
      TestKink<Kernels>(dtype, fusion);
    TestNonFinite<Kernels>(dtype, {3, 5, 7});
    TestNonFinite<Kernels>(dtype, {3, 5, 1});
    TestNonFinite<Kernels>(dtype, {4, 5, 4000});
  }
  TestCase<Kernels>({DType::kFloat64, {4, 3, 2000}, 0, 1e8, 1}, {});
  TestCase<Kernels>({DType::kFloat32, {30, 4, 3000}, 0, 100, 0.1}, {steep});
  TestConversions<Kernels>(DType::kFloat16);
  TestConversions<Kernels>(DType::kBfloat16);
  for (const Layout& layout : {Layout{0, 4, 5}, Layout{3, 4, 0}, Layout{0, 2, 1}})
    TestCase<Kernels>({DType::kFloat32, layout, 0, 0, 1}, all);
}

}  // namespace test
