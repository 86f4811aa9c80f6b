#include "exchange/exchange.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

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

// Each level has subtrees of `width` ranks. `arity` of them form a subtree of the next level.
Position PositionOf(int rank, const std::vector<int>& ranks, int arity) {
  const int64_t size = static_cast<int64_t>(ranks.size());
  const int64_t index = std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin();
  Position position;
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
  Numbers reduced = std::move(part->second.numbers);
  while (++part != parts.end()) {
    const Numbers& higher = part->second.numbers;
    if (signature.operation == Operation::kConcat) {
      reduced.insert(reduced.end(), higher.begin(), higher.end());
      continue;
    }
    if (higher.size() != reduced.size()) {
      throw Error(Concat(key.Title(), ": all devices and ranks must contribute ", reduced.size(),
                         " numbers, got ", higher.size()));
    }
    if (signature.operation == Operation::kMoments) {
      MergeMoments(higher, &reduced);
      continue;
    }
    for (size_t i = 0; i < reduced.size(); ++i) reduced[i] += higher[i];
  }
  parts.clear();
  return reduced;
}

}  // namespace syncbn
