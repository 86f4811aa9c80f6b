// Concatenation, sums, and the merge of moments, in double and in a fixed order, so that every
// device computes the very same numbers.
#include "collective/common/reduce_operation.h"

#include "core/error.h"
#include "core/moments.h"

namespace syncbn {
namespace {

void CheckSizes(const char* what, size_t higher, size_t lower) {
  if (higher == lower) return;
  throw Error(Concat("a ", what, " of ", lower, " numbers cannot take one of ", higher));
}

void Add(const double* from, double* to, size_t size) {
  for (size_t i = 0; i < size; ++i) to[i] += from[i];
}

// Payloads are (count, mean[C], m2[C]).
void MergeMoments(const double* from, double* to, size_t size) {
  if (size % 2 != 1) {
    throw Error(Concat("moments of ", size, " numbers, expected a count and two of each channel"));
  }
  const size_t channels = size / 2;
  for (size_t mean = 1; mean <= channels; ++mean) {
    const size_t m2 = mean + channels;
    const Moments merged = Merge({to[0], to[mean], to[m2]}, {from[0], from[mean], from[m2]});
    to[mean] = merged.mean;
    to[m2] = merged.m2;
  }
  to[0] += from[0];
}

// Not for kConcat.
void ReduceNumbers(ReduceOperation operation, const double* higher, size_t higher_size,
                   double* lower, size_t size) {
  const bool is_sum = operation == ReduceOperation::kSumFloat64;
  CheckSizes(is_sum ? "sum" : "set of moments", higher_size, size);
  is_sum ? Add(higher, lower, size) : MergeMoments(higher, lower, size);
}

}  // namespace

void Reduce(ReduceOperation operation, const Payload& higher, Payload* lower) {
  if (operation == ReduceOperation::kConcat) {
    lower->numbers.insert(lower->numbers.end(), higher.numbers.begin(), higher.numbers.end());
    lower->text += higher.text;
    return;
  }
  ReduceNumbers(operation, higher.numbers.data(), higher.numbers.size(), lower->numbers.data(),
                lower->numbers.size());
}

void Reduce(ReduceOperation operation, const Bytes& higher, Bytes* lower) {
  if (operation == ReduceOperation::kConcat) {
    lower->insert(lower->end(), higher.begin(), higher.end());
    return;
  }
  for (const size_t bytes : {higher.size(), lower->size()}) {
    if (bytes % sizeof(double) == 0) continue;
    throw Error(Concat("a payload of ", bytes, " bytes, expected a multiple of ", sizeof(double)));
  }
  // operator new aligns payloads for doubles.
  ReduceNumbers(operation, reinterpret_cast<const double*>(higher.data()),
                higher.size() / sizeof(double), reinterpret_cast<double*>(lower->data()),
                lower->size() / sizeof(double));
}

}  // namespace syncbn
