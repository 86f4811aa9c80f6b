// A tensor of any dtype for the native tests: it takes and returns values as double, and lies at a
// chosen misalignment between guard bytes. Conversions are done by arithmetic, not on the bits of
// 16-bit numbers, so that they are independent of the kernels'.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/error.h"
#include "core/layout.h"

namespace test {

constexpr syncbn::DType kDTypes[] = {syncbn::DType::kFloat32, syncbn::DType::kFloat64,
                                     syncbn::DType::kFloat16};

inline std::string Describe(const syncbn::Layout& layout) {
  return syncbn::Concat("(", layout.outer, ", ", layout.channels, ", ", layout.inner, ")");
}

struct Precision {
  int digits;  // of the significand, its leading one included
  int min_exponent;  // of normal numbers
  double max;
};

constexpr Precision PrecisionOf(syncbn::DType dtype) {
  switch (dtype) {
    case syncbn::DType::kFloat64: return {53, -1022, std::numeric_limits<double>::max()};
    case syncbn::DType::kFloat32: return {24, -126, std::numeric_limits<float>::max()};
    case syncbn::DType::kFloat16: return {11, -14, 65504.0};
  }
  return {};
}

// std::ilogb of a normal number; less than any min_exponent of zero and subnormals.
inline int ExponentOf(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<int>(bits >> 52 & 0x7ff) - 1023;
}

// 2^exponent, looked up because ldexp takes most of a test's time.
inline double PowerOfTwo(int exponent) {
  constexpr int kLeast = -1074, kMost = 1023;
  static const auto powers = [] {
    std::array<double, kMost - kLeast + 1> every{};
    for (int e = kLeast; e <= kMost; ++e) every[e - kLeast] = std::ldexp(1.0, e);
    return every;
  }();
  return powers.at(exponent - kLeast);
}

// The distance between neighbours at `value`.
inline double Ulp(syncbn::DType dtype, double value) {
  const Precision precision = PrecisionOf(dtype);
  return PowerOfTwo(std::max(ExponentOf(value), precision.min_exponent) - precision.digits + 1);
}

// The nearest number of this dtype; of two that are as near, the even one.
inline double Round(syncbn::DType dtype, double value) {
  if (!std::isfinite(value) || dtype == syncbn::DType::kFloat64) return value;
  const double ulp = Ulp(dtype, value);
  const double rounded = std::nearbyint(value / ulp) * ulp;
  if (std::fabs(rounded) <= PrecisionOf(dtype).max) return rounded;
  return std::copysign(std::numeric_limits<double>::infinity(), value);
}

class Tensor {
 public:
  Tensor(syncbn::DType dtype, int64_t size, int misalign = 0)
      : dtype_(dtype),
        width_(static_cast<int64_t>(syncbn::SizeOf(dtype))),
        size_(size),
        begin_(kGuard + misalign * width_),
        bytes_(begin_ + size * width_ + kGuard, kPattern) {}

  static constexpr int64_t kGuard = 128;  // bytes on either side

  void* data() { return bytes_.data() + begin_; }
  double* doubles() { return static_cast<double*>(data()); }  // of a float64 tensor
  int64_t size() const { return size_; }

  void Set(int64_t i, double value) {
    if (dtype_ == syncbn::DType::kFloat64) return Copy(i, value);
    if (dtype_ == syncbn::DType::kFloat32) return Copy(i, static_cast<float>(value));
    const Precision precision = PrecisionOf(dtype_);
    const double rounded = Round(dtype_, value);
    const int fraction = precision.digits - 1;
    const uint16_t infinity = static_cast<uint16_t>(InfiniteLevel(precision) << fraction);
    uint16_t bits = infinity;
    if (std::isnan(rounded)) {
      bits = static_cast<uint16_t>(infinity | 1 << (fraction - 1));
    } else if (std::isfinite(rounded)) {
      const double ulp = Ulp(dtype_, rounded);
      const int level = ExponentOf(ulp) - (precision.min_exponent - fraction);
      bits = static_cast<uint16_t>((level << fraction) +
                                   static_cast<int>(std::fabs(rounded) / ulp));
    }
    Copy(i, static_cast<uint16_t>(bits | (std::signbit(rounded) ? 0x8000 : 0)));
  }

  double Get(int64_t i) const {
    if (dtype_ == syncbn::DType::kFloat64) return Read<double>(i);
    if (dtype_ == syncbn::DType::kFloat32) return Read<float>(i);
    static const std::vector<double> of_float16 = EveryFloat16();
    return of_float16[Read<uint16_t>(i)];
  }

  void SetBits(int64_t i, uint16_t bits) { Copy(i, bits); }
  // All of them, without the guards.
  std::string Bits() const { return {bytes_.begin() + begin_, bytes_.end() - kGuard}; }

  // True unless something was written around the tensor.
  bool Guarded() const {
    const auto intact = [](unsigned char byte) { return byte == kPattern; };
    return std::all_of(bytes_.begin(), bytes_.begin() + begin_, intact) &&
           std::all_of(bytes_.end() - kGuard, bytes_.end(), intact);
  }

 private:
  static constexpr unsigned char kPattern = 0xff;  // NaN in every dtype

  // The exponent's bits in infinities and NaN.
  static int InfiniteLevel(const Precision& precision) { return 3 - 2 * precision.min_exponent; }

  // All values of float16, by their bits.
  static std::vector<double> EveryFloat16() {
    const Precision precision = PrecisionOf(syncbn::DType::kFloat16);
    const int fraction = precision.digits - 1;
    std::vector<double> values;
    for (int bits = 0; bits <= 0xffff; ++bits) {
      const int level = (bits & 0x7fff) >> fraction;
      const int rest = bits & ((1 << fraction) - 1);
      double value;
      if (level == InfiniteLevel(precision))
        value = rest == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
      else
        value = std::ldexp(rest + (level > 0 ? 1 << fraction : 0),
                           precision.min_exponent - fraction + std::max(level - 1, 0));
      values.push_back(std::copysign(value, (bits & 0x8000) != 0 ? -1.0 : 1.0));
    }
    return values;
  }

  template <typename T>
  void Copy(int64_t i, T value) {
    std::memcpy(bytes_.data() + begin_ + i * width_, &value, sizeof(value));
  }
  template <typename T>
  T Read(int64_t i) const {
    T value;
    std::memcpy(&value, bytes_.data() + begin_ + i * width_, sizeof(value));
    return value;
  }

  syncbn::DType dtype_;
  int64_t width_, size_, begin_;
  std::vector<unsigned char> bytes_;
};

}  // namespace test
