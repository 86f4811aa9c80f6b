#include "exchange/exchange.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace syncbn {

constexpr int kArity = 32;

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

// Here a rank is its index in `ranks`, and a subtree is as wide as a power of kArity.
Position PositionOf(int rank, const std::vector<int>& ranks) {
  const int size = static_cast<int>(ranks.size());
  const int index =
      static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
  Position position;
  for (int64_t width = 1; width < size; width *= kArity, ++position.height) {
    const int64_t offset = index % (width * kArity);
    position.depth += offset >= width;
    if (position.parent >= 0) continue;
    if (offset > 0) position.parent = ranks[index - offset];
    for (int64_t begin = index + width;
         offset == 0 && begin < std::min<int64_t>(size, index + width * kArity); begin += width) {
      const int64_t end = std::min<int64_t>(size, begin + width);
      position.children.push_back({ranks[begin], static_cast<int>(end - begin)});
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
