// Concatenation, sums, and the merge of moments, in double and in a fixed order, so that every
// device computes the very same numbers.
#include "collective/common/reduce_operation.h"

#include "core/error.h"
#include "core/moments.h"

namespace syncbn {
namespace {

// operator new aligns payloads for doubles.
const double* Numbers(const Bytes& bytes) { return reinterpret_cast<const double*>(bytes.data()); }
double* Numbers(Bytes* bytes) { return reinterpret_cast<double*>(bytes->data()); }

void CheckSizes(const char* kind, const Bytes& higher, const Bytes& lower) {
  if (higher.size() == lower.size()) return;
  throw Error(Concat("a ", kind, " of ", lower.size(), " bytes cannot take one of ",
                     higher.size()));
}

void Add(const Bytes& higher, Bytes* lower) {
  CheckSizes("sum", higher, *lower);
  if (lower->size() % sizeof(double) != 0) {
    throw Error(Concat("a sum of ", lower->size(), " bytes, expected a multiple of ",
                       sizeof(double)));
  }
  for (size_t i = 0; i < lower->size() / sizeof(double); ++i) {
    Numbers(lower)[i] += Numbers(higher)[i];
  }
}

// Payloads are (count, mean[C], m2[C]).
void MergeMoments(const Bytes& higher, Bytes* lower) {
  CheckSizes("set of moments", higher, *lower);
  if (lower->size() % (2 * sizeof(double)) != sizeof(double)) {
    throw Error(Concat("moments of ", lower->size(), " bytes, expected a count and two doubles of "
                       "each channel"));
  }
  const double* from = Numbers(higher);
  double* to = Numbers(lower);
  const size_t channels = lower->size() / (2 * sizeof(double));
  for (size_t mean = 1; mean <= channels; ++mean) {
    const size_t m2 = mean + channels;
    const Moments merged = Merge({to[0], to[mean], to[m2]}, {from[0], from[mean], from[m2]});
    to[mean] = merged.mean;
    to[m2] = merged.m2;
  }
  to[0] += from[0];
}

}  // namespace

void Reduce(ReduceOperation operation, const Bytes& higher, Bytes* lower) {
  switch (operation) {
    case ReduceOperation::kConcat:
      lower->insert(lower->end(), higher.begin(), higher.end());
      return;
    case ReduceOperation::kSumFloat64: return Add(higher, lower);
    case ReduceOperation::kMoments: return MergeMoments(higher, lower);
  }
}

}  // namespace syncbn
