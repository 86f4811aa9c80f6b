#include "exchange/exchange.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace syncbn {

std::string Key::Title() const {
  if (phase == Phase::kCall) return layer;
  return Concat("SyncBatchNorm '", layer, "', ", phase == Phase::kForward ? "forward" : "backward");
}

// Each level has subtrees of `width` ranks. `arity` of them form a subtree of the next level.
Position PositionOf(int rank, const std::vector<int>& ranks, int arity) {
  const int64_t size = static_cast<int64_t>(ranks.size());
  const int64_t index = std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin();
  Position position;
  if (index == size || ranks[index] != rank) return position;
  for (int64_t width = 1; width < size; width *= arity, ++position.height) {
    const int64_t offset = index % (width * arity);
    position.depth += offset >= width;
    if (offset > 0) {
      if (position.parent < 0) position.parent = ranks[index - offset];
      continue;
    }
    const int64_t end = std::min(size, index + width * arity);
    for (int64_t child = index + width; child < end; child += width) {
      position.children.push_back({ranks[child], static_cast<int>(std::min(width, size - child))});
    }
  }
  return position;
}

std::vector<Subtree> Exchange::Missing() const {
  if (sent) return {{position.parent, 0}};
  std::vector<Subtree> missing;
  for (const Subtree& child : position.children) {
    if (!parts.count({child.rank})) missing.push_back(child);
  }
  return missing;
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
