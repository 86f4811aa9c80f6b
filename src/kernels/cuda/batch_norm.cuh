// Chooses the cut and the vector's width, and launches: one launch for each pass.
// Who uses it: batch_norm_<type>.cu.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels/cuda/apply.cuh"
#include "kernels/cuda/batch_norm.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/reduce.cuh"

namespace syncbn {
namespace cuda {

static_assert(kWorkspaceZeros == kCounters * sizeof(unsigned), "the counters are what starts as 0");

constexpr int kVectorBytes = 16;

template <typename T>
constexpr int Wide() {
  return kVectorBytes / static_cast<int>(sizeof(T));
}

// How to read tensors of one layout: vectors where all of them lie alike, else single elements.
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
  const bool empty = layout.PerChannel() == 0;
  if (alike && (empty || !PrefersColumns(layout, Wide<T>(), sizeof(T)))) return {true, false, first};
  if (alike && first == 0 && layout.channels * layout.inner % Wide<T>() == 0)
    return {true, true, 0};
  return {false, !empty && PrefersColumns(layout, 1, sizeof(T)), 0};
}

inline Workspace WorkspaceAt(void* workspace) {
  char* const bytes = static_cast<char*>(workspace);
  return {reinterpret_cast<unsigned*>(bytes), reinterpret_cast<Pair*>(bytes + kWorkspaceZeros)};
}

inline int64_t Partials(const Planes& cut) { return cut.Splits() > 1 ? cut.Blocks() : 0; }
inline int64_t Partials(const Columns& cut) {
  return cut.outer_blocks > 1 ? cut.layout.channels * cut.outer_blocks : 0;
}

template <int kWidth>
Columns CutForSums(const Layout& layout, int multiprocessors, bool fused) {
  return CutColumns(layout, kWidth, multiprocessors * ResidentColumns(kWidth, fused));
}

template <typename T, template <typename, int, int> class Sums, int kWidth, typename Arguments>
void ReduceBy(const char* name, const Choice& choice, const Layout& layout,
              const Arguments& arguments, void* workspace, Stream stream) {
  const Workspace scratch = WorkspaceAt(workspace);
  if (choice.columns) {
    using Each = Sums<T, kWidth, kWidth>;
    const Columns cut = CutForSums<kWidth>(layout, Multiprocessors(), Each::kFused);
    Launch(name, ReduceColumns<T, Each>, cut.Blocks(), kColumnsThreads, stream, cut,
           arguments, scratch);
  } else {
    using Together = Sums<T, kWidth, 1>;
    const Planes cut = CutPlanes(layout, kWidth, choice.misalign, Multiprocessors());
    // Single elements are whole vectors always.
    Launch(name,
           cut.whole ? ReducePlanes<T, Together, true> : ReducePlanes<T, Together, kWidth == 1>,
           cut.Blocks(), kPlanesThreads, stream, cut, arguments, scratch);
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
    Launch(name, ApplyColumns<T, kWidth, Map>, cut.Blocks(), kColumnsThreads, stream, cut,
           arguments);
  } else {
    const Planes cut = CutPlanes(layout, kWidth, choice.misalign, Multiprocessors());
    Launch(name,
           cut.whole ? ApplyPlanes<T, kWidth, Map, true> : ApplyPlanes<T, kWidth, Map, kWidth == 1>,
           cut.Blocks(), kPlanesThreads, stream, cut, arguments);
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
int64_t BatchNorm<T>::WorkspaceBytes(const Layout& layout) {
  // Alignment is not known yet: the most of what any needs. Fused kernels have no more blocks.
  const int multiprocessors = Multiprocessors();
  int64_t partials = 0;
  for (int width : {1, Wide<T>()}) {
    for (int misalign : {0, width - 1}) {
      partials = std::max(partials, Partials(CutPlanes(layout, width, misalign, multiprocessors)));
    }
  }
  if (layout.PerChannel() > 0 && PrefersColumns(layout, 1, sizeof(T))) {
    partials = std::max(partials, Partials(CutForSums<1>(layout, multiprocessors, false)));
  }
  if (layout.PerChannel() > 0 && PrefersColumns(layout, Wide<T>(), sizeof(T)) &&
      layout.channels * layout.inner % Wide<T>() == 0) {
    partials = std::max(partials, Partials(CutForSums<Wide<T>()>(layout, multiprocessors, false)));
  }
  return kWorkspaceZeros + partials * static_cast<int64_t>(sizeof(Pair));
}

template <typename T>
void BatchNorm<T>::LocalMoments(const T* x, const Layout& layout, void* workspace, double* mean,
                                double* m2, Stream stream) {
  const MomentArguments<T> arguments{{x}, mean, m2};
  Reduce<T, MomentSums>("LocalMoments", Choose<T>(layout, {x}), layout, arguments, workspace,
                        stream);
}

template <typename T>
void BatchNorm<T>::BackwardSums(const T* t, const T* dy, const Layout& layout,
                                const Recovery& recovery, const double* mean, void* workspace,
                                double* sum_dz, double* sum_dz_u, Stream stream) {
  const auto f = MakeSlopes<Arithmetic<T>>(recovery.activation, recovery.from_output);
  const GradientArguments<T> arguments{{t, dy}, mean,   recovery.scale, recovery.offset,
                                       f,       sum_dz, sum_dz_u};
  const Choice choice = Choose<T>(layout, {t, dy});
  if (f.kind == kPlain) {
    Reduce<T, PlainGradientSums>("BackwardSums", choice, layout, arguments, workspace, stream);
  } else {
    Reduce<T, FusedGradientSums>("BackwardSums", choice, layout, arguments, workspace, stream);
  }
}

template <typename T>
void BatchNorm<T>::Normalize(const T* x, const Layout& layout, const double* mean,
                             const double* scale, const double* offset,
                             const Activation& activation, Write write, T* y, Stream stream) {
  const auto f = MakeSlopes<Arithmetic<T>>(activation, false);
  const NormalizeArguments<T> arguments{{x}, mean, scale, offset, f, y, write == Write::kAdd};
  const Choice choice = Choose<T>(layout, {x, y});
  if (f.kind == kPlain) {
    Apply<T, NormalizeMap<T, Plain>>("Normalize", choice, layout, arguments, stream);
  } else {
    Apply<T, NormalizeMap<T, FusedForward>>("Normalize", choice, layout, arguments, stream);
  }
}

template <typename T>
void BatchNorm<T>::BackwardApply(const T* t, const T* dy, const Layout& layout,
                                 const Recovery& recovery, const double* mean, const double* a,
                                 const double* b, const double* d, Write write, T* dx,
                                 Stream stream) {
  const auto f = MakeSlopes<Arithmetic<T>>(recovery.activation, recovery.from_output);
  const BackwardArguments<T> arguments{{t, dy}, mean, recovery.scale, recovery.offset, a, b, d, f,
                                       dx,      write == Write::kAdd};
  const Choice choice = Choose<T>(layout, {t, dy, dx});
  if (f.kind == kPlain) {
    Apply<T, BackwardMap<T, Plain>>("BackwardApply", choice, layout, arguments, stream);
  } else {
    Apply<T, BackwardMap<T, FusedBackward>>("BackwardApply", choice, layout, arguments, stream);
  }
}

}  // namespace cuda
}  // namespace syncbn
