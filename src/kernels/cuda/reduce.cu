// The reductions of each channel to two numbers. Blocks that share channels write partial results
// to the workspace, and the last block to finish merges them in order, so that no bit is random.
//
// `Terms` has Begin(pass, activation, c, x), which receives a thread's first element of channel c;
// Add(activation, x, dy, first, second), which adds an element's terms to two sums; Neutral(), an x
// that with a dy of 0 adds nothing; Of(sums), which returns a thread's contribution; kHasOrigin,
// true if contributions have an origin; Merge(a, b), which merges two contributions; Finish(pass,
// c, all), which writes the results; kBackward, true if it reads dy; and kName, the name in errors.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/passes.h"
#include "kernels/cuda/tensor.cuh"

namespace syncbn::cuda {
namespace {

// A thread's sums, or the contribution of a thread or a block to a channel. A contribution to the
// moments is (count, mean - origin, m2, origin). A contribution to gradients is two sums.
struct Partial {
  double count, first, second, origin;
};

struct Workspace {
  unsigned* counters;  // kCounters zeros; every kernel restores the zeros
  Partial* partials;   // splits x channels
};
static_assert(kWorkspaceZeros == kCounters * sizeof(unsigned));

// Merges at(channel, i) for i < entries, for each channel of the block. Then one thread of each
// channel calls use(channel, all). The order depends only on sizes. `shared` has kThreads elements.
template <typename Terms, typename At, typename Use>
__device__ void MergeByChannel(int channels, int entries, const At& at, const Use& use,
                               Partial* shared) {
  const int thread = static_cast<int>(threadIdx.x);
  int group = kThreads;  // threads per channel
  while (group > 1 && group * channels > kThreads) group /= 2;
  const int channel = thread / group, lane = thread % group;
  Partial all = {};
  if (channel < channels) {
    for (int i = lane; i < entries; i += group) all = Terms::Merge(all, at(channel, i));
  }
  for (int half = group / 2; half > 0; half /= 2) {
    __syncthreads();
    shared[thread] = all;
    __syncthreads();
    if (lane < half) all = Terms::Merge(all, shared[thread + half]);
  }
  if (channel < channels && lane == 0) use(channel, all);
}

// Returns true in the last of `blocks` blocks that call this function. The last block then sees
// everything that the others wrote before their calls.
__device__ bool IsLast(unsigned* counter, unsigned blocks) {
  __threadfence();
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1u) == blocks - 1;
    if (last) *counter = 0;
  }
  last = __syncthreads_or(last);
  if (last) __threadfence();
  return last;
}

// The contributions of a block's threads. A Partial for each would be twice as large, and fewer
// blocks would fit on a multiprocessor.
template <typename T, int kSums, bool kHasOrigin>
struct ThreadPartials {
  double counts[kThreads], firsts[kThreads * kSums], seconds[kThreads * kSums];
  Arithmetic<T> origins[kHasOrigin ? kThreads * kSums : 1];

  __device__ void Set(int thread, int k, const Partial& own) {
    const int i = thread * kSums + k;
    counts[thread] = own.count;
    firsts[i] = own.first;
    seconds[i] = own.second;
    if (kHasOrigin) origins[i] = static_cast<Arithmetic<T>>(own.origin);  // exact: an element
  }
  __device__ Partial Get(int i) const {
    return {counts[i / kSums], firsts[i], seconds[i], kHasOrigin ? origins[i] : 0};
  }
};

// Returns the first of the elements that a thread has read, or 0 if there is none.
template <typename T, int kWidth, int kUnroll>
__device__ T FirstElement(const Place (&places)[kUnroll], const Vector<T, kWidth> (&in)[kUnroll]) {
  T first = in[0].values[0];
  if (places[0].elements & 1) return first;
#pragma unroll
  for (int u = kUnroll - 1; u >= 0; --u) {
#pragma unroll
    for (int j = kWidth - 1; j >= 0; --j) {
      if (places[u].elements >> j & 1) first = in[u].values[j];
    }
  }
  return first;
}

// A double addition takes 32 to 64 times as long as a float addition on most GPUs.
constexpr int kMostTerms = 32;

// The compiler spills registers if it chooses this number itself.
constexpr int kBlocksPerMultiprocessor = 3;

// kSums is kWidth if elements of a vector can be in different channels (cut.columns), otherwise 1.
template <typename T, int kWidth, int kSums, typename Terms>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    ReduceKernel(Cut cut, ReductionPass pass, Workspace workspace) {
  using A = Arithmetic<T>;
  constexpr int kUnroll = Terms::kBackward ? 2 : 4;  // loads of a tensor in flight
  const Work work = cut.At(blockIdx.x, static_cast<int>(threadIdx.x));
  const FusedActivation<A> activation(pass);
  Terms terms[kSums];
  Partial sums[kSums] = {};
  // Sums of at most kMostTerms elements have the data's arithmetic. All other sums are double.
  constexpr int kTerms = kUnroll * (kWidth / kSums);
  A first[kSums] = {}, second[kSums] = {};
  int groups = 0;
  int64_t elements = 0;  // that each sum has
  for (Walk walk = cut.Begin(work); walk.i < walk.end;) {
    Place places[kUnroll];
    Vector<T, kWidth> in[kUnroll] = {}, dy[kUnroll] = {};
    ReadVectors<Terms::kBackward>(pass, cut, &walk, places, in, dy);
    if (elements == 0) {
      int64_t channels[kSums];
      cut.ChannelsOf(work, channels);
#pragma unroll
      for (int k = 0; k < kSums; ++k) {
        const T x = kSums == 1 ? FirstElement(places, in) : in[0].values[k];
        terms[k].Begin(pass, activation, channels[k], x);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (places[u].elements == 0) continue;
      elements += kWidth / kSums;
      if (places[u].elements != kAllElements<kWidth>) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          if (places[u].elements >> j & 1) continue;
          in[u].values[j] = terms[j % kSums].Neutral();  // dy is 0
          --elements;
        }
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const int k = j % kSums;
        terms[k].Add(activation, Load(in[u].values[j]), Load(dy[u].values[j]), &first[k],
                     &second[k]);
      }
    }
    if (++groups < kMostTerms / kTerms && walk.i < walk.end) continue;
    groups = 0;
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      sums[k].first += first[k];
      sums[k].second += second[k];
      first[k] = second[k] = 0;
    }
  }

  // All threads read `threads` before any thread writes `groups`.
  __shared__ union {
    ThreadPartials<T, kSums, Terms::kHasOrigin> threads;
    Partial groups[kThreads];
  } shared;
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    sums[k].count = static_cast<double>(elements);
    const Partial own = elements > 0 ? terms[k].Of(sums[k]) : sums[k];
    shared.threads.Set(static_cast<int>(threadIdx.x), k, own);
  }
  __syncthreads();
  const int stride = cut.row_threads * kSums;  // contributions of a row of threads
  const int inner = cut.columns ? static_cast<int>(cut.layout.inner) : 1;
  const auto finish = [&](int channel, const Partial& all) {
    Terms::Finish(pass, work.channel + channel, all);
  };
  const auto partial_of = [&](int channel, int64_t split) {
    return workspace.partials + split * cut.layout.channels + work.channel + channel;
  };
  MergeByChannel<Terms>(
      work.channels, cut.rows * inner,
      [&](int channel, int i) {
        return shared.threads.Get(i / inner * stride + channel * inner + i % inner);
      },
      [&](int channel, const Partial& all) {
        if (cut.splits == 1) {
          finish(channel, all);
        } else {
          *partial_of(channel, work.split) = all;
        }
      },
      shared.groups);
  if (cut.splits == 1) return;
  if (!IsLast(workspace.counters + work.tile, static_cast<unsigned>(cut.splits))) return;
  MergeByChannel<Terms>(
      work.channels, static_cast<int>(cut.splits),
      [&](int channel, int split) -> Partial {
        // Volatile reads bypass the first-level cache, where other blocks' writes are missing.
        const volatile Partial* const partial = partial_of(channel, split);
        return {partial->count, partial->first, partial->second, partial->origin};
      },
      finish, shared.groups);
}

template <template <typename> typename Terms>
void Reduce(const ReductionPass& pass, void* workspace, cudaStream_t stream) {
  if (pass.layout.channels == 0) return;
  char* const bytes = static_cast<char*>(workspace);
  const Workspace scratch{reinterpret_cast<unsigned*>(bytes),
                          reinterpret_cast<Partial*>(bytes + kWorkspaceZeros)};
  const auto launch = [&](auto element, auto width, auto channels, const Cut& cut) {
    using T = decltype(element);
    Launch<ReduceKernel<T, decltype(width)::value, decltype(channels)::value, Terms<T>>>(
        Terms<T>::kName, cut.tiles * cut.splits, kThreads, stream, cut, pass, scratch);
  };
  WithDType(pass, {pass.in, pass.dy}, launch);
}

// ---- the first pass of forward: mean and m2 = sum((x - mean)^2) --------------------------------
//
//   u = x - shift,  mean = shift + sum(u) / n,  m2 = sum(u * u) - sum(u)^2 / n
//
// `shift` is the first value that a thread reads, so |u| is about the standard deviation, and a
// large mean costs no accuracy. A Partial therefore contains mean - origin, not the mean, where
// origin is the shift of a thread. Partials are merged in double.

template <typename T>
struct MomentTerms {
  using A = Arithmetic<T>;
  static constexpr char kName[] = "LocalMoments";
  static constexpr bool kBackward = false, kHasOrigin = true;
  A shift;

  __device__ void Begin(const ReductionPass& /*pass*/, const FusedActivation<A>& /*activation*/,
                        int64_t /*c*/, T x) {
    shift = Load(x);
  }
  __device__ T Neutral() const { return Store<T>(shift); }
  __device__ void Add(const FusedActivation<A>& /*activation*/, A x, A /*dy*/, A* first,
                      A* second) const {
    const A u = x - shift;
    *first += u;
    *second += u * u;
  }
  __device__ Partial Of(const Partial& sums) const {
    const double mean = sums.first / sums.count, m2 = sums.second - mean * sums.first;
    return {sums.count, mean, m2 < 0 ? 0 : m2, shift};  // below 0 by rounding; NaN stays NaN
  }
  __device__ static Partial Merge(const Partial& a, const Partial& b) {
    if (a.count == 0) return b;
    if (b.count == 0) return a;
    const double mean_from_a = b.first + (b.origin - a.origin);
    const Moments all =
        syncbn::Merge({a.count, a.first, a.second}, {b.count, mean_from_a, b.second});
    return {all.count, all.mean, all.m2, a.origin};
  }
  __device__ static void Finish(const ReductionPass& pass, int64_t c, const Partial& all) {
    pass.first[c] = all.origin + all.first;
    pass.second[c] = all.second;
  }
};

// ---- the first pass of backward: the sums of dz and of dz * xmu (see activation.inl) ------------
//
// Threads sum dz * centered. They subtract the mean or offset, rounded to the data's arithmetic.
// Finish corrects the sum for this rounding, and converts it to the sum of dz * xmu.

template <typename T>
struct GradientTerms {
  using A = Arithmetic<T>;
  static constexpr char kName[] = "BackwardSums";
  static constexpr bool kBackward = true, kHasOrigin = false;
  Affine<A> to_z;

  __device__ void Begin(const ReductionPass& pass, const FusedActivation<A>& activation, int64_t c,
                        T /*x*/) {
    to_z = activation.MakeToZ(pass, c);
  }
  __device__ T Neutral() const { return Store<T>(0); }
  __device__ void Add(const FusedActivation<A>& activation, A saved, A dy, A* first,
                      A* second) const {
    A centered, dz;
    Unwind(activation.variant, saved, dy, to_z, activation.slopes, &centered, &dz);
    *first += dz;
    *second += dz * centered;
  }
  __device__ Partial Of(const Partial& sums) const { return sums; }
  __device__ static Partial Merge(const Partial& a, const Partial& b) {
    return {0, a.first + b.first, a.second + b.second, 0};
  }
  __device__ static void Finish(const ReductionPass& pass, int64_t c, const Partial& all) {
    const double center = CenterOf(pass)[c];
    const double lost = center - static_cast<double>(static_cast<A>(center));
    pass.first[c] = all.first;
    pass.second[c] = PerScale(all.second - lost * all.first, pass, c);
  }
};

}  // namespace

// MakeCut lets at most kBlocksEach blocks per multiprocessor share tiles and write Partials.
int64_t WorkspaceBytes() {
  return kWorkspaceZeros + kBlocksEach * Multiprocessors() * kMaxTileChannels * sizeof(Partial);
}

void LocalMoments(const ReductionPass& pass, void* workspace, cudaStream_t stream) {
  Reduce<MomentTerms>(pass, workspace, stream);
}

void BackwardSums(const ReductionPass& pass, void* workspace, cudaStream_t stream) {
  Reduce<GradientTerms>(pass, workspace, stream);
}

}  // namespace syncbn::cuda
