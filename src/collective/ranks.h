// The ranks of a program, as one of them sees them.
// Who uses it: protocol.cc and its parts.
#pragma once
#include <set>
#include <vector>

namespace syncbn {

struct Ranks {
  // All but this process and those in `excluded`, ascending.
  std::vector<int> OthersBut(const std::set<int>& excluded) const {
    std::vector<int> others;
    for (int rank = 0; rank < size; ++rank) {
      if (rank != own && !excluded.count(rank)) others.push_back(rank);
    }
    return others;
  }

  int own, size;
};

}  // namespace syncbn
