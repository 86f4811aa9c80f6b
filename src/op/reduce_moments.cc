// The reduce operation "moments": of payloads (count, mean[C], m2[C]), in double and in a fixed
// order, so that every device computes the very same numbers.
// Who uses it: sync_batch_norm.cc, by its name.
#include "collective/reduce_operation.h"
#include "core/error.h"
#include "core/moments.h"

namespace syncbn {
namespace {

void ReduceMoments(const Bytes& higher, Bytes* lower) {
  if (higher.size() != lower->size()) {
    throw Error(Concat("moments of ", lower->size(), " bytes cannot take those of ",
                       higher.size()));
  }
  if (lower->size() % (2 * sizeof(double)) != sizeof(double)) {
    throw Error(Concat("moments of ", lower->size(), " bytes, expected a count and two doubles of "
                       "each channel"));
  }
  // operator new aligns both.
  const double* from = reinterpret_cast<const double*>(higher.data());
  double* to = reinterpret_cast<double*>(lower->data());
  const size_t channels = lower->size() / (2 * sizeof(double));
  for (size_t mean = 1; mean <= channels; ++mean) {
    const size_t m2 = mean + channels;
    const Moments merged = Merge({to[0], to[mean], to[m2]}, {from[0], from[mean], from[m2]});
    to[mean] = merged.mean;
    to[m2] = merged.m2;
  }
  to[0] += from[0];
}

const RegisterReduceOperation moments("moments", ReduceMoments);

}  // namespace
}  // namespace syncbn
