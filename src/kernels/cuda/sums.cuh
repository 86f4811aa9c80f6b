// The two reductions, as the work of one thread on the elements that it reads. Nothing here knows
// memory layouts.
//
// A thread adds up several lanes in the data's arithmetic (float, or double), and folds them into
// totals every few vectors, so that a chain of additions stays short. Between threads and
// blocks all is double. `kShifts` is 1 where all lanes belong to one channel, else kWidth.
// `kUnroll` is how many vectors of each tensor a thread asks for before it uses the first.
#pragma once
#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/numeric.h"
#include "kernels/cuda/partition.h"

namespace syncbn::cuda {

struct alignas(kPartialBytes) Pair {
  double first, second;
};

__device__ inline Pair operator+(const Pair& a, const Pair& b) {
  return {a.first + b.first, a.second + b.second};
}

template <typename T, int kVectorWidth, int kShiftCount>
struct Lanes {
  static constexpr int kWidth = kVectorWidth, kShifts = kShiftCount;
  // If all belong to one channel, four are enough to hide an addition's latency.
  static constexpr int kLanes = kShifts == 1 && kWidth > 4 ? 4 : kWidth;
  using A = Arithmetic<T>;
  A first[kLanes] = {}, second[kLanes] = {};
  A total_first[kShifts] = {}, total_second[kShifts] = {};

  __device__ void Fold() {
#pragma unroll
    for (int k = 0; k < kShifts; ++k) {
      A sum_first = first[k], sum_second = second[k];
      first[k] = second[k] = 0;
#pragma unroll
      for (int j = k + kShifts; j < kLanes; j += kShifts) {
        sum_first += first[j];
        sum_second += second[j];
        first[j] = second[j] = 0;
      }
      total_first[k] += sum_first;
      total_second[k] += sum_second;
    }
  }
};

template <typename T>
struct MomentArguments {
  const T* tensors[1];  // x
  double *mean, *m2;
};

// mean and m2. A thread takes deviations from the first value that it reads, so that they are small
// whatever the mean is; then, in double, from the channel's first value, as all threads do.
template <typename T, int kWidth, int kShifts>
struct MomentSums : Lanes<T, kWidth, kShifts> {
  using typename Lanes<T, kWidth, kShifts>::A;
  static constexpr bool kFused = false;
  // Less for many columns, which fill the registers.
  static constexpr int kTensors = 1, kUnroll = kShifts > 4 ? 3 : 4;
  using Arguments = MomentArguments<T>;
  A shift[kShifts];

  __device__ void Shift(const Arguments& /*arguments*/, int k, int64_t /*channel*/, T first) {
    shift[k] = Load(first);
  }
  // Counts as no element.
  __device__ T Filler(int /*tensor*/, int k) const { return Store<T>(shift[k]); }

  __device__ void Add(const Vector<T, kWidth> (&x)[1]) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const A deviation = Load(x[0].values[j]) - shift[j % kShifts];
      this->first[j % this->kLanes] += deviation;
      this->second[j % this->kLanes] += deviation * deviation;
    }
  }

  // The sums of `count` elements about the channel's first value.
  __device__ Pair Sums(const Arguments& arguments, int k, int64_t count, int64_t origin) const {
    if (count == 0) return {0, 0};
    const double n = static_cast<double>(count), first = this->total_first[k];
    const double off = static_cast<double>(shift[k]) - Load(arguments.tensors[0][origin]);
    return {first + n * off, this->total_second[k] + off * (2 * first + n * off)};
  }

  __device__ static void Finish(const Arguments& arguments, int64_t channel, int64_t count,
                                int64_t origin, const Pair& sums) {
    const bool empty = count == 0;
    const double mean = empty ? 0 : sums.first / static_cast<double>(count);
    const double m2 = sums.second - mean * sums.first;
    arguments.mean[channel] = empty ? 0 : Load(arguments.tensors[0][origin]) + mean;
    arguments.m2[channel] = m2 < 0 ? 0 : m2;  // rounding; NaN stays
  }
};

template <typename T>
struct GradientArguments {
  const T* tensors[2];  // saved, dy
  Unwinding by;
  Slopes<Arithmetic<T>> f;
  double *sum_dz, *sum_dz_xmu;
};

// sum_dz and sum_dz_xmu, about the center as the arithmetic can hold it; what that loses of the
// center is corrected at the end.
template <typename T, int kWidth, int kShifts, Variant kVariant>
struct GradientSums : Lanes<T, kWidth, kShifts> {
  using typename Lanes<T, kWidth, kShifts>::A;
  static constexpr bool kFused = kVariant != kPlain;
  static constexpr int kTensors = 2;
  // Less for many columns and in double, which fill the registers.
  static constexpr int kUnroll = kFused && (kShifts > 4 || sizeof(T) == 8) ? 1 : 2;
  using Arguments = GradientArguments<T>;
  Affine<A> to_z[kShifts];
  Slopes<A> f;

  __device__ void Shift(const Arguments& arguments, int k, int64_t channel, T /*first*/) {
    f = arguments.f;
    to_z[k] = AffineToUnwind<kVariant, A>(arguments.by, channel);
  }
  // With a dy of 0 an element adds nothing.
  __device__ T Filler(int /*tensor*/, int /*k*/) const { return Store<T>(0); }

  __device__ void Add(const Vector<T, kWidth> (&tensors)[2]) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      A centered, dz;
      Unwind<kVariant>(Load(tensors[0].values[j]), Load(tensors[1].values[j]), to_z[j % kShifts], f,
                       &centered, &dz);
      this->first[j % this->kLanes] += dz;
      this->second[j % this->kLanes] += dz * centered;
    }
  }

  __device__ Pair Sums(const Arguments& /*arguments*/, int k, int64_t /*count*/,
                       int64_t /*origin*/) const {
    return {static_cast<double>(this->total_first[k]), static_cast<double>(this->total_second[k])};
  }

  __device__ static void Finish(const Arguments& arguments, int64_t channel, int64_t /*count*/,
                                int64_t /*origin*/, const Pair& sums) {
    const double center = arguments.by.center[channel];
    const double lost = center - static_cast<double>(static_cast<A>(center));
    const double sum_dz_centered = sums.second - lost * sums.first;
    arguments.sum_dz[channel] = sums.first;
    arguments.sum_dz_xmu[channel] = PerScale(sum_dz_centered, arguments.by, channel);
  }
};

template <Variant kVariant>
struct GradientSumsOf {
  template <typename T, int kWidth, int kShifts>
  using Sums = GradientSums<T, kWidth, kShifts, kVariant>;
};

}  // namespace syncbn::cuda
