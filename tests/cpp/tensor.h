// A tensor of any dtype for the native tests, between guard bytes. Its values are read and written
// as double. float16 is converted by a table of its 65536 numbers, independently of the kernels.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/tensor.h"

namespace test {

constexpr syncbn::DType kDTypes[] = {syncbn::DType::kFloat32, syncbn::DType::kFloat64,
                                     syncbn::DType::kFloat16};

inline std::string Describe(const syncbn::Layout& layout) {
  const std::string shape =
      syncbn::Concat("(", layout.outer, ", ", layout.channels, ", ", layout.inner, ")");
  return layout.block == 1 ? shape : syncbn::Concat(shape, " in blocks of ", layout.block);
}

// The memory of tensors and vectors. CUDA tests replace both functions by functions of CUDA.
inline void* (*allocate)(size_t bytes) = std::malloc;
inline void (*release)(void* memory) = std::free;

template <typename T>
struct Allocator {
  using value_type = T;
  T* allocate(size_t size) { return static_cast<T*>(test::allocate(size * sizeof(T))); }
  void deallocate(T* memory, size_t) { release(memory); }
  bool operator==(const Allocator&) const { return true; }
  bool operator!=(const Allocator&) const { return false; }
};
template <typename T>
using Vector = std::vector<T, Allocator<T>>;

struct Precision {
  int digits;        // digits of the significand, including the leading one
  int min_exponent;  // smallest exponent of normal numbers
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

// The distance between neighbours at `value`.
inline double Ulp(syncbn::DType dtype, double value) {
  const Precision precision = PrecisionOf(dtype);
  const int exponent = std::max(std::ilogb(value), precision.min_exponent);
  return std::ldexp(1.0, exponent - precision.digits + 1);
}

// Returns the nearest number of this dtype, ties to even.
inline double Round(syncbn::DType dtype, double value) {
  if (!std::isfinite(value) || dtype == syncbn::DType::kFloat64) return value;
  const double ulp = Ulp(dtype, value);
  const double rounded = std::nearbyint(value / ulp) * ulp;
  if (std::fabs(rounded) <= PrecisionOf(dtype).max) return rounded;
  return std::copysign(std::numeric_limits<double>::infinity(), value);
}

// The values of all float16 numbers, indexed by their bits. Nonnegative values ascend.
inline const std::vector<double>& EveryFloat16() {
  static const std::vector<double> all = [] {
    std::vector<double> values;
    for (int bits = 0; bits <= 0xffff; ++bits) {
      const int exponent = bits >> 10 & 31, fraction = bits & 1023;
      double value = std::ldexp(fraction + (exponent > 0 ? 1024 : 0), std::max(exponent, 1) - 25);
      if (exponent == 31) value = fraction == 0 ? INFINITY : NAN;
      values.push_back(std::copysign(value, (bits & 0x8000) != 0 ? -1.0 : 1.0));
    }
    return values;
  }();
  return all;
}

inline uint16_t ToFloat16(double value) {
  const double rounded = Round(syncbn::DType::kFloat16, value);
  const auto infinity = EveryFloat16().begin() + 0x7c00;
  const auto place = std::lower_bound(EveryFloat16().begin(), infinity, std::fabs(rounded));
  const int bits = std::isnan(rounded) ? 0x7e00 : static_cast<int>(place - infinity + 0x7c00);
  return static_cast<uint16_t>(bits | (std::signbit(rounded) ? 0x8000 : 0));
}

class Tensor {
 public:
  Tensor(syncbn::DType dtype, int64_t size, int misaligned_elements = 0)
      : dtype_(dtype),
        width_(static_cast<int64_t>(syncbn::SizeOf(dtype))),
        size_(size),
        begin_(kGuard + misaligned_elements * width_),
        bytes_(begin_ + size * width_ + kGuard, kPattern) {}

  static constexpr int64_t kGuard = 128;  // bytes on either side

  void* data() { return bytes_.data() + begin_; }
  double* doubles() { return static_cast<double*>(data()); }  // the dtype must be float64
  int64_t size() const { return size_; }
  syncbn::DType dtype() const { return dtype_; }

  void Set(int64_t i, double value) {
    if (dtype_ == syncbn::DType::kFloat64) return Write(i, value);
    if (dtype_ == syncbn::DType::kFloat32) return Write(i, static_cast<float>(value));
    Write(i, ToFloat16(value));
  }

  double Get(int64_t i) const {
    if (dtype_ == syncbn::DType::kFloat64) return Read<double>(i);
    if (dtype_ == syncbn::DType::kFloat32) return Read<float>(i);
    return EveryFloat16()[Read<uint16_t>(i)];
  }

  void SetHalf(int64_t i, uint16_t bits) { Write(i, bits); }
  std::string Bytes() const { return {bytes_.begin() + begin_, bytes_.end() - kGuard}; }

  bool GuardsAreIntact() const {
    const auto intact = [](unsigned char byte) { return byte == kPattern; };
    return std::all_of(bytes_.begin(), bytes_.begin() + begin_, intact) &&
           std::all_of(bytes_.end() - kGuard, bytes_.end(), intact);
  }

 private:
  static constexpr unsigned char kPattern = 0xff;  // NaN in every dtype

  template <typename T>
  void Write(int64_t i, T value) {
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
  Vector<unsigned char> bytes_;
};

}  // namespace test
