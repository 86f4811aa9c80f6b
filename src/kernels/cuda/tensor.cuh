// Elements and vectors of a tensor on the device, and the activation.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "kernels/cuda/check.h"
#include "kernels/cuda/cut.h"
#include "kernels/passes.h"

namespace syncbn::cuda {

#define SYNCBN_FORMULA __device__ inline
#include "kernels/activation.inl"
#undef SYNCBN_FORMULA

template <typename T>
using Arithmetic = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ inline float Load(float value) { return value; }
__device__ inline double Load(double value) { return value; }
__device__ inline float Load(__half value) { return __half2float(value); }

// Rounds to nearest, ties to even.
template <typename T>
__device__ inline T Store(Arithmetic<T> value) {
  return value;
}
template <>
__device__ inline __half Store<__half>(float value) {
  return __float2half_rn(value);
}

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T values[kWidth];
};

template <typename T>
constexpr int kWide = kVectorBytes / sizeof(T);

template <int kWidth>
constexpr unsigned kAllElements = (1u << kWidth) - 1;

// Bypasses the first-level cache, because each element is read once.
template <typename T, int kWidth>
__device__ Vector<T, kWidth> Read(const void* tensor, int64_t at) {
  const T* const from = static_cast<const T*>(tensor) + at;
  Vector<T, kWidth> vector;
  if constexpr (kWidth == 1) {
    vector.values[0] = __ldcg(from);
  } else {
    const uint4 bits = __ldcg(reinterpret_cast<const uint4*>(from));
    memcpy(&vector, &bits, sizeof(bits));
  }
  return vector;
}

template <typename T, int kWidth>
__device__ Vector<T, kWidth> Read(const void* tensor, const Place& place) {
  if (place.elements == kAllElements<kWidth>) return Read<T, kWidth>(tensor, place.at);
  Vector<T, kWidth> vector = {};
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if (place.elements >> j & 1) vector.values[j] = Read<T, 1>(tensor, place.at + j).values[0];
  }
  return vector;
}

template <typename T, int kWidth>
__device__ void Write(void* tensor, const Place& place, const Vector<T, kWidth>& vector) {
  T* const to = static_cast<T*>(tensor) + place.at;
  if (place.elements == kAllElements<kWidth>) {
    *reinterpret_cast<Vector<T, kWidth>*>(to) = vector;
    return;
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    if (place.elements >> j & 1) to[j] = vector.values[j];
  }
}

// Reads a thread's next kUnroll vectors. Elements that are not the thread's are 0.
template <bool kBackward, typename T, int kWidth, int kUnroll>
__device__ inline void ReadVectors(const PassInput& pass, const Cut& cut, Walk* walk,
                                   Place (&places)[kUnroll], Vector<T, kWidth> (&in)[kUnroll],
                                   Vector<T, kWidth> (&dy)[kUnroll]) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    places[u] = cut.Take<kWidth>(walk);
    if (places[u].elements == 0) continue;
    in[u] = Read<T, kWidth>(pass.in, places[u]);
    if (kBackward) dy[u] = Read<T, kWidth>(pass.dy, places[u]);
  }
}

template <typename A>
struct FusedActivation {
  Variant variant;
  Slopes<A> slopes;

  __device__ explicit FusedActivation(const PassInput& pass)
      : variant(VariantOf(pass)), slopes(MakeSlopes<A>(pass.activation.slope)) {}

  // Returns Unwind's argument `to_z`. Unwind reads only `to_z.center` except with kLeakyOfX.
  __device__ Affine<A> MakeToZ(const PassInput& pass, int64_t c) const {
    if (variant != kLeakyOfX) return {static_cast<A>(CenterOf(pass)[c]), 0, 0};
    return MakeAffine<A>(pass.mean[c], pass.scale[c], pass.offset[c]);
  }
};

// Calls run(element, width, channels, cut). `element` is a T, and `cut` divides the pass over
// `tensors`. The cut's vectors have `width` elements of at most `channels` channels.
template <typename T, typename Run>
void WithWidth(const PassInput& pass, std::initializer_list<const void*> tensors, const Run& run) {
  const bool aligned = std::all_of(tensors.begin(), tensors.end(), [](const void* tensor) {
    return reinterpret_cast<uintptr_t>(tensor) % kVectorBytes == 0;
  });
  const Cut cut = MakeCut(pass.layout, sizeof(T), aligned, Multiprocessors());
  constexpr std::integral_constant<int, kWide<T>> wide{};
  constexpr std::integral_constant<int, 1> one{};
  if (cut.width == 1) return run(T(), one, one, cut);
  if (cut.columns) return run(T(), wide, wide, cut);
  run(T(), wide, one, cut);
}

template <typename Run>
void WithDType(const PassInput& pass, std::initializer_list<const void*> tensors, const Run& run) {
  switch (pass.dtype) {
    case DType::kFloat32: return WithWidth<float>(pass, tensors, run);
    case DType::kFloat64: return WithWidth<double>(pass, tensors, run);
    case DType::kFloat16: return WithWidth<__half>(pass, tensors, run);
  }
}

}  // namespace syncbn::cuda
