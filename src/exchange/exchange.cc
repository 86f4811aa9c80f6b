#include "exchange/exchange.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace syncbn {

std::string Key::Title() const {
  if (phase == Phase::kCall) return layer;
  return Concat("SyncBatchNorm '", layer, "', ", phase == Phase::kForward ? "forward" : "backward");
}

bool Exchange::Awaits(int rank, int other) const {
  const std::vector<int>& ranks = signature.ranks;
  if (other == rank || !std::binary_search(ranks.begin(), ranks.end(), other)) return false;
  return IsRoot(rank) ? !parts.count({other}) : sent && other == ranks[0];
}

Numbers Exchange::Reduce() {
  auto part = parts.begin();
  BatchMoments reduced{std::move(part->second.numbers)};
  Numbers& numbers = reduced.numbers;
  while (++part != parts.end()) {
    Numbers& higher = part->second.numbers;
    if (signature.operation == Operation::kConcat) {
      numbers.insert(numbers.end(), higher.begin(), higher.end());
      continue;
    }
    if (higher.size() != numbers.size()) {
      throw Error(Concat(key.Title(), ": all devices and ranks must contribute ", numbers.size(),
                         " numbers, got ", higher.size()));
    }
    if (signature.operation == Operation::kMoments) {
      reduced.MergeWith({std::move(higher)});
      continue;
    }
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] += higher[i];
  }
  parts.clear();
  return std::move(numbers);
}

}  // namespace syncbn
