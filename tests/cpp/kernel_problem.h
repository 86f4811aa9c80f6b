// Random data for the tests of kernels, and expected results with error bounds: each rounding adds
// at most the unit roundoff (eps) of the kernels' arithmetic times the sizes of the summed terms.
#pragma once
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <utility>
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

constexpr double kEps64 = 0x1p-53;  // unit roundoff, half of the machine epsilon

// Returns the unit roundoff of the arithmetic of passes that write a tensor.
inline double EpsOf(DType dtype) { return dtype == DType::kFloat64 ? kEps64 : 0x1p-24; }

struct Case {
  DType dtype;
  Layout layout;
  int misalign;  // elements
  double center, deviation;
  bool x_is_aligned = false;  // true: only dy and the outputs are misaligned
};

struct Moments {
  long double mean = 0, m2 = 0;
  double farthest = 0;  // the largest |x - mean|
};

// The expected value, and the largest error that a result may have.
struct Value {
  long double value;
  double error;
};

struct XmuAndDz {
  Value xmu, dz;  // see PassInput in kernels/passes.h
};

// The values that a pass must write, for each element.
struct Expected {
  std::vector<Value> values;
  double error_of_old;  // adding to an old value errs by at most this times |old value|
};

inline double Size(long double value) { return static_cast<double>(std::fabs(value)); }

// Returns f(z). The error of z is multiplied by at most the steeper slope of f.
inline Value Activate(const Activation& f, const Value& z, double eps) {
  if (f.function == Function::kIdentity) return z;
  const long double y = z.value <= 0 ? f.slope * z.value : z.value;
  return {y, std::max(1.0, f.slope) * z.error + 4 * eps * Size(y)};
}

// Returns dy * f'(z). f' jumps by |1 - slope| at 0, so the error of dz is |1 - slope| * |dy| if the
// sign of z is uncertain.
inline Value Unwind(const Activation& f, const Value& z, double dy, double eps) {
  if (f.function == Function::kIdentity || z.value > z.error) return {dy, 0};
  const long double dz = z.value <= 0 ? f.slope * static_cast<long double>(dy) : dy;
  double error = 4 * eps * Size(dz);
  if (Size(z.value) <= z.error && z.error > 0) error += std::fabs(1 - f.slope) * std::fabs(dy);
  return {dz, error};
}

// Returns f^-1(y). Kernels compute y * (1 / slope) if y <= 0, which rounds twice.
inline Value Reconstructed(const Activation& f, double y, double eps) {
  if (y > 0 || f.function == Function::kIdentity) return {y, 0};
  const long double q = static_cast<long double>(y) / f.slope;
  return {q, 2 * eps * Size(q)};
}

inline unsigned seed = 7;

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
                             of.misalign, of.x_is_aligned ? " (x is aligned)" : "", ", x around ",
                             of.center)) {
    std::mt19937 generator(seed);
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

  syncbn::PassInput Forward(const Activation& activation) {
    return {c.dtype, c.layout,    x.data(),     nullptr,      activation,
            false,   mean.data(), scale.data(), offset.data()};
  }

  // If `from_output`, member x serves as y, and member mean as the offset.
  syncbn::PassInput Backward(const Activation& activation, bool from_output) {
    syncbn::PassInput input = Forward(activation);
    input.dy = dy.data();
    input.from_output = from_output;
    if (activation.function == Function::kIdentity) input.offset = nullptr;
    if (from_output) input.offset = std::exchange(input.mean, nullptr);
    return input;
  }

  int64_t Index(int64_t outer, int64_t channel, int64_t inner) const {
    const int64_t block = c.layout.block,
                  first = outer * c.layout.channels + channel / block * block;
    return first * c.layout.inner + inner * block + channel % block;
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

  // Returns z. Kernels round the mean, and add scale * (rounded mean - mean) to the offset.
  Value Z(int64_t channel, int64_t i, double eps) const {
    const long double u = x.Get(i) - static_cast<long double>(mean[channel]);
    const long double centered = scale[channel] * u;
    const double added = std::fabs(scale[channel] * mean[channel]) * eps;
    return {centered + offset[channel],
            4 * eps * (Size(centered) + std::fabs(offset[channel]) + added)};
  }

  Expected Y(const Activation& activation) const {
    const double eps = EpsOf(c.dtype);
    return {Each([&](int64_t channel, int64_t i) {
              const Value y = Activate(activation, Z(channel, i, eps), eps);
              return Value{y.value, y.error + eps * Size(y.value)};
            }),
            eps};
  }

  XmuAndDz XmuAndDzOf(const syncbn::PassInput& r, int64_t channel, int64_t i, double eps) const {
    const Value saved{x.Get(i), 0};
    if (!r.from_output) {
      const long double xmu = saved.value - mean[channel];
      return {{xmu, 2 * eps * Size(xmu)}, Unwind(r.activation, Z(channel, i, eps), dy.Get(i), eps)};
    }
    const Value z = Reconstructed(r.activation, x.Get(i), eps);
    const long double xmu = (z.value - mean[channel]) / scale[channel];
    return {{xmu, z.error / std::fabs(scale[channel]) + 3 * eps * Size(xmu)},
            Unwind(r.activation, saved, dy.Get(i), eps)};  // y has the sign of z
  }

  Expected Dx(const syncbn::PassInput& r) const {
    const double eps = EpsOf(c.dtype);
    return {Each([&](int64_t channel, int64_t i) {
              const XmuAndDz g = XmuAndDzOf(r, channel, i, eps);
              const long double of_dz = scale[channel] * g.dz.value;
              const long double of_xmu = scale_xmu[channel] * g.xmu.value;
              const double divisor = r.from_output ? scale[channel] : 1;
              const double added = std::fabs(scale_xmu[channel] / divisor * mean[channel]) * eps;
              const double terms = Size(of_dz) + Size(of_xmu) + std::fabs(shift[channel]) + added;
              const double of_inputs = std::fabs(scale[channel]) * g.dz.error +
                                       std::fabs(scale_xmu[channel]) * g.xmu.error;
              return Value{of_dz + of_xmu + shift[channel], of_inputs + 6 * eps * terms};
            }),
            6 * eps};
  }

 private:
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
