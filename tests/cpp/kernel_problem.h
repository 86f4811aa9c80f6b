// Random data for the tests of kernels, and the expected results in long double with tolerances.
//
// Tolerances are error bounds, not measurements: eps of the arithmetic times the sizes of the
// summed terms. The arithmetic rounds every result, and every input except x, y and dy.
#pragma once
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "core/parallel_for.h"
#include "kernels/passes.h"
#include "tensor.h"

namespace test {

using syncbn::Activation;
using syncbn::DType;
using syncbn::Function;
using syncbn::Layout;
using syncbn::WriteMode;

constexpr double kEps64 = 0x1p-53;

// The eps of the arithmetic of passes that write a tensor.
inline double EpsOf(DType dtype) { return dtype == DType::kFloat64 ? kEps64 : 0x1p-24; }

struct Case {
  DType dtype;
  Layout layout;
  int misalign;  // number of elements
  double center, deviation;
  bool x_is_aligned = false;  // dy and the outputs are misaligned
};

struct Moments {
  long double mean = 0, m2 = 0;
  double farthest = 0;  // |x - mean|
};

// The expected value, and the largest error that a result may have.
struct Value {
  long double value;
  double error;
};

struct XmuAndDz {
  Value xmu, dz;
};

// The values that a pass must write, for each element.
struct Expected {
  std::vector<Value> values;
  double error_of_old;  // the error of adding to an old value, relative to it

  Value AddedTo(double old, int64_t i) const {
    return {values[i].value + old, values[i].error + error_of_old * std::fabs(old)};
  }
};

inline double Size(long double value) { return static_cast<double>(std::fabs(value)); }

// Returns f(z). f multiplies an error of z by at most its steepest slope, because f is continuous.
// `slope` and the product are also rounded.
inline Value Activate(const Activation& f, const Value& z, double eps) {
  if (f.function == Function::kIdentity) return z;
  const long double y = z.value <= 0 ? f.slope * z.value : z.value;
  return {y, std::max(1.0, f.slope) * z.error + 4 * eps * Size(y)};
}

// Returns dy * f'(z). f' jumps by |1 - slope| at 0, so the error of dz is |1 - slope| * |dy| if the
// sign of z is uncertain.
inline Value Unwind(const Activation& f, const Value& z, double dy, double eps) {
  if (f.function == Function::kIdentity) return {dy, 0};
  const long double dz = z.value <= 0 ? f.slope * static_cast<long double>(dy) : dy;
  double error = 4 * eps * Size(dz);
  if (Size(z.value) <= z.error && z.error > 0) error += std::fabs(1 - f.slope) * std::fabs(dy);
  return {dz, error};
}

// Returns f^-1(y) of a leaky ReLU; 1 / slope and the product are rounded.
inline Value Reconstructed(const Activation& f, double y, double eps) {
  if (y > 0 || f.function == Function::kIdentity) return {y, 0};
  const long double q = static_cast<long double>(y) / f.slope;
  return {q, 2 * eps * Size(q)};
}

// Returns dy * f'(f^-1(y)); the sign of y is certain.
inline Value UnwindOutput(const Activation& f, double y, double dy, double eps) {
  if (f.function == Function::kIdentity || y > 0) return {dy, 0};
  const long double dz = static_cast<long double>(f.slope) * dy;
  return {dz, 4 * eps * Size(dz)};
}

// The seed of all data.
inline unsigned& Seed() {
  static unsigned seed = 7;
  return seed;
}

struct Problem {
  Case c;
  Tensor x, dy;
  Vector<double> mean, scale, offset, scale_xmu, shift;
  std::string label;

  explicit Problem(const Case& of)
      : c(of),
        x(of.dtype, of.layout.Size(), of.x_is_aligned ? 0 : of.misalign),
        dy(of.dtype, of.layout.Size(), of.misalign),
        label(syncbn::Concat(syncbn::Name(of.dtype), " ", Describe(of.layout), " misaligned by ",
                             of.misalign, of.x_is_aligned ? " but for x" : "", ", about ",
                             of.center)) {
    std::mt19937 generator(Seed());
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < x.size(); ++i) {
      x.Set(i, c.center + c.deviation * normal(generator));
      dy.Set(i, normal(generator));
    }
    for (int64_t i = 0; i < c.layout.channels; ++i) {
      mean.push_back(c.center + 0.1 * normal(generator));
      for (auto* vector : {&scale, &offset, &scale_xmu, &shift})
        vector->push_back(normal(generator));
      scale.back() += std::copysign(0.5, scale.back());  // backward from y divides by the scale
    }
  }

  // Returns the input of a backward pass with this activation. If `from_output`, member x serves as
  // y, and member mean as the offset.
  syncbn::PassInput From(const Activation& activation, bool from_output) {
    const bool reads_z = from_output || activation.function != Function::kIdentity;
    syncbn::PassInput input{c.dtype, c.layout, x.data(), dy.data(), activation, from_output};
    input.mean = from_output ? nullptr : mean.data();
    input.scale = scale.data();
    if (reads_z) input.offset = from_output ? mean.data() : offset.data();
    return input;
  }

  int64_t Index(int64_t outer, int64_t channel, int64_t inner) const {
    return (outer * c.layout.channels + channel) * c.layout.inner + inner;
  }

  template <typename Visit>
  void ForEach(int64_t channel, const Visit& visit) const {
    for (int64_t o = 0; o < c.layout.outer; ++o)
      for (int64_t i = 0; i < c.layout.inner; ++i) visit(Index(o, channel, i));
  }

  Moments ExpectedMoments(int64_t channel) const {
    Moments e;
    ForEach(channel, [&](int64_t i) { e.mean += x.Get(i); });
    if (c.layout.PerChannel() > 0) e.mean /= c.layout.PerChannel();
    ForEach(channel, [&](int64_t i) {
      const long double deviation = x.Get(i) - e.mean;
      e.m2 += deviation * deviation;
      e.farthest = std::max(e.farthest, Size(deviation));
    });
    return e;
  }

  // Returns z. Kernels add to the offset what rounding the mean loses (at most eps * mean), which
  // costs one or two more roundings.
  Value Z(int64_t channel, int64_t i, double eps) const {
    const long double u = x.Get(i) - static_cast<long double>(mean[channel]);
    const long double centered = scale[channel] * u;
    const double lost = std::fabs(scale[channel] * mean[channel]) * eps;
    return {centered + offset[channel],
            4 * eps * (Size(centered) + std::fabs(offset[channel]) + lost)};
  }

  Expected Y(const Activation& activation) const {
    const double eps = EpsOf(c.dtype);
    return {Each([&](int64_t channel, int64_t i) {
              const Value y = Activate(activation, Z(channel, i, eps), eps);
              return Value{y.value, y.error + eps * Size(y.value)};
            }),
            eps};
  }

  // Returns xmu and dz. Their errors leave out what rounding the mean loses.
  XmuAndDz Unwound(const syncbn::PassInput& r, int64_t channel, int64_t i, double eps) const {
    const Value z = r.from_output         ? Reconstructed(r.activation, x.Get(i), eps)
                    : r.offset != nullptr ? Z(channel, i, eps)
                                          : Value{0, 0};
    const long double divisor = r.from_output ? scale[channel] : 1;
    const long double xmu = ((r.from_output ? z.value : x.Get(i)) - mean[channel]) / divisor;
    const Value dz = r.from_output ? UnwindOutput(r.activation, x.Get(i), dy.Get(i), eps)
                                   : Unwind(r.activation, z, dy.Get(i), eps);
    const double error = r.from_output ? z.error / Size(divisor) + eps * Size(xmu) : 0;
    return {{xmu, error + 2 * eps * Size(xmu)}, dz};
  }

  Expected Dx(const syncbn::PassInput& r) const {
    const double eps = EpsOf(c.dtype);
    return {Each([&](int64_t channel, int64_t i) {
              const XmuAndDz g = Unwound(r, channel, i, eps);
              const long double of_dz = scale[channel] * g.dz.value;
              const long double of_xmu = scale_xmu[channel] * g.xmu.value;
              const double divisor = r.from_output ? scale[channel] : 1;
              const double lost = std::fabs(scale_xmu[channel] / divisor * mean[channel]) * eps;
              const double terms = Size(of_dz) + Size(of_xmu) + std::fabs(shift[channel]) + lost;
              const double of_inputs = std::fabs(scale[channel]) * g.dz.error +
                                       std::fabs(scale_xmu[channel]) * g.xmu.error;
              return Value{of_dz + of_xmu + shift[channel], of_inputs + 6 * eps * terms};
            }),
            6 * eps};
  }

 private:
  // Returns expected(channel, element) for every element.
  template <typename Of>
  std::vector<Value> Each(const Of& expected) const {
    std::vector<Value> values(static_cast<size_t>(x.size()));
    syncbn::ParallelFor(c.layout.channels, [&](int64_t channel) {
      ForEach(channel, [&](int64_t i) { values[i] = expected(channel, i); });
    });
    return values;
  }
};

}  // namespace test
