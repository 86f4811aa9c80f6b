// Reductions in double and in a fixed order, so that every device computes the very same numbers.
#include "op/reducers.h"

#include "collective/merger.h"
#include "core/error.h"
#include "core/moments.h"

namespace syncbn {
namespace {

// MergeMoments of two processes.
void MergeMomentBytes(const Bytes& higher, Bytes* lower) {
  if (higher.size() != lower->size()) {
    throw Error(Concat("moments of ", lower->size(), " bytes meet those of ", higher.size()));
  }
  const Payload a = ToPayload(*lower), b = ToPayload(higher);
  if (a.size() % 2 == 0) {
    throw Error(Concat("moments of ", a.size(), " numbers, expected a count and two of each channel"));
  }
  Payload merged;
  MergeMoments({&a, &b}, &merged);
  *lower = ToBytes(merged);
}

const RegisterMerger moments("moments", MergeMomentBytes);

}  // namespace

void MergeMoments(const std::vector<const Payload*>& payloads, Payload* result) {
  *result = *payloads.front();
  const size_t channels = (result->size() - 1) / 2;
  for (size_t k = 1; k < payloads.size(); ++k) {
    const Payload& shard = *payloads[k];
    for (size_t c = 0; c < channels; ++c) {
      const size_t mean = 1 + c, m2 = 1 + channels + c;
      const Moments merged = Merge({(*result)[0], (*result)[mean], (*result)[m2]},
                                   {shard[0], shard[mean], shard[m2]});
      (*result)[mean] = merged.mean;
      (*result)[m2] = merged.m2;
    }
    (*result)[0] += shard[0];
  }
}

void Sum(const std::vector<const Payload*>& payloads, Payload* result) {
  *result = *payloads.front();
  for (size_t k = 1; k < payloads.size(); ++k) {
    for (size_t i = 0; i < result->size(); ++i) (*result)[i] += (*payloads[k])[i];
  }
}

}  // namespace syncbn
