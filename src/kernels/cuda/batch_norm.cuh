// Chooses the cut and the vector's width, and launches: one launch for each pass.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels/cuda/apply.cuh"
#include "kernels/cuda/batch_norm.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/reduce.cuh"

namespace syncbn::cuda {

static_assert(kWorkspaceZeros == kCounters * sizeof(unsigned), "the counters are what starts as 0");

constexpr int kVectorBytes = 16;

template <typename T>
constexpr int Wide() {
  return kVectorBytes / static_cast<int>(sizeof(T));
}

// The way to read tensors of one layout: vectors if all of them lie alike, else single elements.
struct Choice {
  bool wide, columns;
  int misalign;  // in elements; 0 for single elements
};

template <typename T>
Choice Choose(const Layout& layout, std::initializer_list<const void*> tensors) {
  const auto misalign = [](const void* tensor) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(tensor) % kVectorBytes / sizeof(T));
  };
  const int first = misalign(*tensors.begin());
  const bool alike = std::all_of(tensors.begin(), tensors.end(),
                                 [&](const void* tensor) { return misalign(tensor) == first; });
  const auto columns = [&](int width) {
    return layout.PerChannel() > 0 && PrefersColumns(layout, width, sizeof(T));
  };
  const bool whole = first == 0 && layout.channels * layout.inner % Wide<T>() == 0;
  if (alike && columns(Wide<T>()) && whole) return {true, true, 0};
  if (alike && !(columns(Wide<T>()) && columns(1))) return {true, false, first};
  return {false, columns(1), 0};
}

inline Workspace WorkspaceAt(void* workspace) {
  char* const bytes = static_cast<char*>(workspace);
  return {reinterpret_cast<unsigned*>(bytes), reinterpret_cast<Pair*>(bytes + kWorkspaceZeros)};
}

template <typename T, template <typename, int, int> class Sums, int kWidth, typename Arguments>
void ReduceBy(const char* name, const Choice& choice, const Layout& layout,
              const Arguments& arguments, void* workspace, Stream stream) {
  const Workspace scratch = WorkspaceAt(workspace);
  if (choice.columns) {
    using Each = Sums<T, kWidth, kWidth>;
    const Columns cut =
        CutColumns(layout, kWidth, Multiprocessors() * ResidentColumns(kWidth, Each::kFused));
    Launch<ReduceColumns<T, Each>>(name, cut.Blocks(), kColumnsThreads, stream, cut, arguments,
                                   scratch);
  } else if constexpr (kWidth > 1 || Sums<T, 1, 1>::kTensors > 1) {  // a tensor is like itself
    using Together = Sums<T, kWidth, 1>;
    const Planes cut = CutPlanes(layout, kWidth, choice.misalign, Multiprocessors());
    // Single elements are whole vectors always.
    const auto launch =
        cut.aligned
            ? Launch<ReducePlanes<T, Together, true>, Planes, Arguments, Workspace>
            : Launch<ReducePlanes<T, Together, kWidth == 1>, Planes, Arguments, Workspace>;
    launch(name, cut.Blocks(), kPlanesThreads, stream, cut, arguments, scratch);
  }
}

template <typename T, template <typename, int, int> class Sums, typename Arguments>
void Reduce(const char* name, const Choice& choice, const Layout& layout,
            const Arguments& arguments, void* workspace, Stream stream) {
  if (layout.channels == 0) return;
  if (choice.wide) {
    ReduceBy<T, Sums, Wide<T>()>(name, choice, layout, arguments, workspace, stream);
  } else {
    ReduceBy<T, Sums, 1>(name, choice, layout, arguments, workspace, stream);
  }
}

template <typename T, typename Map, int kWidth>
void ApplyBy(const char* name, const Choice& choice, const Layout& layout,
             const typename Map::Arguments& arguments, Stream stream) {
  if (choice.columns) {
    // Twice as many as run at once, because they do not all start at the same moment.
    const Columns cut =
        CutColumns(layout, kWidth, 2 * ResidentColumns(kWidth, Map::kFused) * Multiprocessors());
    Launch<ApplyColumns<T, kWidth, Map>>(name, cut.Blocks(), kColumnsThreads, stream, cut,
                                         arguments);
  } else {
    const Planes cut = CutPlanes(layout, kWidth, choice.misalign, Multiprocessors());
    using Arguments = typename Map::Arguments;
    const auto launch =
        cut.aligned ? Launch<ApplyPlanes<T, kWidth, Map, true>, Planes, Arguments>
                  : Launch<ApplyPlanes<T, kWidth, Map, kWidth == 1>, Planes, Arguments>;
    launch(name, cut.Blocks(), kPlanesThreads, stream, cut, arguments);
  }
}

template <typename T, typename Map>
void Apply(const char* name, const Choice& choice, const Layout& layout,
           const typename Map::Arguments& arguments, Stream stream) {
  if (layout.Size() == 0) return;
  if (choice.wide) {
    ApplyBy<T, Map, Wide<T>()>(name, choice, layout, arguments, stream);
  } else {
    ApplyBy<T, Map, 1>(name, choice, layout, arguments, stream);
  }
}

template <typename T>
const T* In(const void* tensor) {
  return static_cast<const T*>(tensor);
}

template <typename T>
void BatchNorm<T>::LocalMoments(const ReductionPass& pass, void* workspace, Stream stream) {
  const MomentArguments<T> arguments{{In<T>(pass.in)}, pass.first, pass.second};
  Reduce<T, MomentSums>("LocalMoments", Choose<T>(pass.layout, {pass.in}), pass.layout, arguments,
                        workspace, stream);
}

template <typename T>
void BatchNorm<T>::BackwardSums(const ReductionPass& pass, void* workspace, Stream stream) {
  const GradientArguments<T> arguments{
      {In<T>(pass.in), In<T>(pass.dy)}, UnwindingOf(pass),
      MakeSlopes<Arithmetic<T>>(pass.activation.slope), pass.first, pass.second};
  const Choice choice = Choose<T>(pass.layout, {pass.in, pass.dy});
  BackwardVariants::With(VariantOf(pass.activation, pass.from_output), [&](auto variant) {
    Reduce<T, GradientSumsOf<decltype(variant)::value>::template Sums>(
        "BackwardSums", choice, pass.layout, arguments, workspace, stream);
  });
}

template <typename T>
void BatchNorm<T>::Normalize(const ElementwisePass& pass, Stream stream) {
  const NormalizeArguments<T> arguments{
      {In<T>(pass.in)}, pass.mean, pass.scale, pass.offset,
      MakeSlopes<Arithmetic<T>>(pass.activation.slope), static_cast<T*>(pass.out),
      pass.mode == WriteMode::kAdd};
  const Choice choice = Choose<T>(pass.layout, {pass.in, pass.out});
  ForwardVariants::With(VariantOf(pass.activation, false), [&](auto variant) {
    Apply<T, NormalizeMap<T, decltype(variant)::value>>("Normalize", choice, pass.layout, arguments,
                                                     stream);
  });
}

template <typename T>
void BatchNorm<T>::BackwardApply(const ElementwisePass& pass, Stream stream) {
  const BackwardArguments<T> arguments{
      {In<T>(pass.in), In<T>(pass.dy)}, UnwindingOf(pass), pass.scale_xmu, pass.shift,
      MakeSlopes<Arithmetic<T>>(pass.activation.slope), static_cast<T*>(pass.out),
      pass.mode == WriteMode::kAdd};
  const Choice choice = Choose<T>(pass.layout, {pass.in, pass.dy, pass.out});
  BackwardVariants::With(VariantOf(pass.activation, pass.from_output), [&](auto variant) {
    Apply<T, BackwardMap<T, decltype(variant)::value>>("BackwardApply", choice, pass.layout,
                                                    arguments, stream);
  });
}

}  // namespace syncbn::cuda
