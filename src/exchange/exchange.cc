#include "exchange/exchange.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/error.h"
#include "core/moments.h"

namespace syncbn {

void MergeMoments(const Numbers& from, Numbers* to) {
  Numbers& all = *to;
  const size_t channels = all.size() / 2;
  for (size_t mean = 1; mean <= channels; ++mean) {
    const size_t m2 = mean + channels;
    const Moments merged = Merge({all[0], all[mean], all[m2]}, {from[0], from[mean], from[m2]});
    all[mean] = merged.mean;
    all[m2] = merged.m2;
  }
  all[0] += from[0];
}

std::string Key::Title() const {
  if (phase == Phase::kCall) return layer;
  return Concat("SyncBatchNorm '", layer, "', ", phase == Phase::kForward ? "forward" : "backward");
}

std::vector<int> Exchange::MissingRanks() const {
  if (root >= 0) return {root};
  std::vector<int> missing;
  std::copy_if(leaves.begin(), leaves.end(), std::back_inserter(missing),
               [&](int rank) { return !parts.count({rank}); });
  return missing;
}

Numbers Exchange::Reduce() {
  auto part = parts.begin();
  Numbers reduced = std::move(part->second.numbers);
  const bool is_sum = signature.operation == Operation::kSum;
  while (++part != parts.end()) {
    const Numbers& higher = part->second.numbers;
    if (higher.size() != reduced.size() || (!is_sum && higher.size() % 2 == 0)) {
      throw Error(Concat(key.Title(), ": all devices and ranks must contribute ", reduced.size(),
                         " numbers, an odd number for moments, got ", higher.size()));
    }
    if (!is_sum) {
      MergeMoments(higher, &reduced);
      continue;
    }
    for (size_t i = 0; i < reduced.size(); ++i) reduced[i] += higher[i];
  }
  parts.clear();
  return reduced;
}

}  // namespace syncbn
