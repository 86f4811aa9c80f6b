// The kernels that compute a tensor element by element, for both ways to cut one. What is computed
// is the template parameter, see maps.cuh.
//
// Blocks start at the tensor's end, and each at the end of its part: that is what the reduction
// before has left in the second-level cache. The output may be one of the inputs. Adding to it is
// rare: only then it is read, late, to leave the registers to vectors that are asked for ahead.
#pragma once
#include "kernels/cuda/access.h"
#include "kernels/cuda/maps.cuh"

namespace syncbn::cuda {

// One vector of each tensor through its element's map, added to `out` or instead of it.
template <typename T, int kWidth, typename Map, int kMaps>
__device__ void ApplyVector(const Map (&maps)[kMaps], const typename Map::Arguments& arguments,
                            const Vector<T, kWidth> (&tensors)[Map::kTensors],
                            Vector<T, kWidth>* out) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    T elements[Map::kTensors];
#pragma unroll
    for (int k = 0; k < Map::kTensors; ++k) elements[k] = tensors[k].values[j];
    const auto value = maps[j % kMaps].Of(elements, arguments.f);
    out->values[j] = Store<T>(arguments.add ? Load(out->values[j]) + value : value);
  }
}

// `kAligned` as in Planes::SlotOf.
template <typename T, int kWidth, typename Map, bool kAligned>
__global__ void __launch_bounds__(kPlanesThreads, kResidentPlanes)
    ApplyPlanes(Planes cut, typename Map::Arguments arguments) {
  constexpr int kUnroll = Map::kUnroll;
  const Planes::Block block = cut.At(gridDim.x - 1 - blockIdx.x);
  const T zero = Store<T>(0);
  Map maps[1];
  maps[0].Take(arguments, block.channel);
  constexpr int kStep = kUnroll * kPlanesThreads;
  for (int step = (block.items - 1) / kStep; step >= 0; --step) {
    const int item = step * kStep + static_cast<int>(threadIdx.x);
    Vector<T, kWidth> tensors[kUnroll][Map::kTensors];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Slot slot = cut.SlotOf<kAligned>(block, item + u * kPlanesThreads);
#pragma unroll
      for (int k = 0; k < Map::kTensors; ++k) {
        tensors[u][k] = ReadSlot<kAligned, kWidth>(arguments.tensors[k], slot, zero);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Slot slot = cut.SlotOf<kAligned>(block, item + u * kPlanesThreads);
      Vector<T, kWidth> out = {};
      if (arguments.add) out = ReadSlot<kAligned, kWidth>(arguments.out, slot, zero);
      ApplyVector(maps, arguments, tensors[u], &out);
      WriteSlot<kAligned, kWidth>(arguments.out, slot, out);
    }
  }
}

template <typename T, int kWidth, typename Map>
__global__ void __launch_bounds__(kColumnsThreads, ResidentColumns(kWidth, Map::kFused))
    ApplyColumns(Columns cut, typename Map::Arguments arguments) {
  using Wide = Vector<T, kWidth>;
  // Four columns of a fused pass have the most coefficients: registers suffice for three rows.
  constexpr int kUnroll =
      Map::kFused && kWidth == 4 ? 3 : UnrollColumns(kWidth, Map::kFused, Map::kUnroll);
  const Columns::Block block = cut.At(gridDim.x - 1 - blockIdx.x);
  const Columns::Place place = cut.PlaceOf(block, static_cast<int>(threadIdx.x));
  if (place.count == 0) return;
  Bits<T, kWidth> tensors[kUnroll][Map::kTensors];
  int64_t offset = place.offset;
  int left = place.count;
  const auto ask = [&] {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= left) continue;
      const int64_t at = offset + u * cut.row_step;
#pragma unroll
      for (int k = 0; k < Map::kTensors; ++k) {
        tensors[u][k] = *reinterpret_cast<const Bits<T, kWidth>*>(arguments.tensors[k] + at);
      }
    }
  };
  // Before the coefficients, because there are many to load and to convert.
  ask();
  Map maps[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    maps[j].Take(arguments, cut.ChannelOf(block, place.column + j));
  }
  while (true) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u >= left) continue;
      T* const to = arguments.out + offset + u * cut.row_step;
      Wide vectors[Map::kTensors];
      memcpy(&vectors, &tensors[u], sizeof(vectors));
      Wide out = {};
      if (arguments.add) out = *reinterpret_cast<const Wide*>(to);
      ApplyVector(maps, arguments, vectors, &out);
      *reinterpret_cast<Wide*>(to) = out;
    }
    left -= kUnroll;
    if (left <= 0) return;
    offset += kUnroll * cut.row_step;
    ask();
  }
}

}  // namespace syncbn::cuda
