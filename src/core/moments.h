// The moments of numbers, and how two sets of them are merged.
#pragma once
#include <cstddef>
#include <vector>

// Marks functions that both the host and CUDA kernels call.
#if defined(__CUDACC__)
#define SYNCBN_HOST_DEVICE __host__ __device__
#else
#define SYNCBN_HOST_DEVICE
#endif

namespace syncbn {

// The moments of a set of numbers.
struct Moments {
  double count = 0;
  double mean = 0;
  double m2 = 0;  // sum of (x - mean)^2
};

// Returns the moments of the union of two sets. Chan, Golub, LeVeque: Algorithms for computing the
// sample variance, doi:10.1080/00031305.1983.10483115.
SYNCBN_HOST_DEVICE inline Moments Merge(const Moments& a, const Moments& b) {
  if (b.count == 0) return a;
  if (a.count == 0) return b;
  const double count = a.count + b.count;
  const double delta = b.mean - a.mean;
  const double weight = b.count / count;
  return {count, a.mean + delta * weight, a.m2 + b.m2 + delta * delta * a.count * weight};
}

using Numbers = std::vector<double>;

// The moments of each channel of a shard or of a batch, with one count.
struct BatchMoments {
  Numbers numbers;  // as in exchanges: (count, mean[C], m2[C])

  double count() const { return numbers[0]; }  // elements per channel
  size_t channels() const { return numbers.size() / 2; }
  double mean(size_t c) const { return numbers[1 + c]; }
  double m2(size_t c) const { return numbers[1 + channels() + c]; }

  void MergeWith(const BatchMoments& other) {
    for (size_t c = 0; c < channels(); ++c) {
      const Moments merged =
          Merge({count(), mean(c), m2(c)}, {other.count(), other.mean(c), other.m2(c)});
      numbers[1 + c] = merged.mean;
      numbers[1 + channels() + c] = merged.m2;
    }
    numbers[0] += other.count();
  }
};

}  // namespace syncbn
