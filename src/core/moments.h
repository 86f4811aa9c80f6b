// Moments of a set of numbers.
#pragma once
#include "core/tensor.h"

namespace syncbn {

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

}  // namespace syncbn
