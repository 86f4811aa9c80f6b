// Who sends to whom in an exchange: a tree over its ranks, in their order. A process is known here
// by its position among them.
//
// Up to 32 ranks are a star around the first. Of more, each 32 neighbours have a star around the
// first of them, and so have each 32 of those. So a subtree is an interval of positions, and what
// is reduced from subtree to subtree is reduced in the order of ranks.
#pragma once
#include <algorithm>
#include <vector>

namespace syncbn {

struct Subtree {
  int begin, end;  // positions; `begin` sends for all of them
};

constexpr int kArity = 32;

inline int ParentOf(int position) {
  int width = 1;
  while (position % (width * kArity) == 0) width *= kArity;
  return position - position % (width * kArity);
}

// Those below the root of `size` positions, or below another one, in ascending order.
inline std::vector<Subtree> ChildrenOf(int position, int size) {
  std::vector<Subtree> children;
  for (int width = 1; position % width == 0 && width < size; width *= kArity) {
    if (position % (width * kArity) != 0) break;
    for (int begin = position + width; begin < std::min(size, position + width * kArity);
         begin += width) {
      children.push_back({begin, std::min(size, begin + width)});
    }
  }
  return children;
}

}  // namespace syncbn
