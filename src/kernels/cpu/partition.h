// The cut of a tensor into tiles, by its shape alone, never by the number of threads: partial
// results are therefore the same in every run. It must not know dtypes nor instruction sets.
#pragma once
#include <cstdint>

#include "core/layout.h"
#include "kernels/cpu/isa.h"

namespace syncbn::cpu {

struct Partition {
  Layout layout;
  int64_t outer_step = 1, channel_step = 1, inner_step = 1;
  int64_t outer_blocks = 0, channel_blocks = 0, inner_blocks = 0;

  int64_t Tiles() const { return outer_blocks * channel_blocks * inner_blocks; }

  // Tiles that cover one channel; each gives a partial result for it.
  int64_t Partials() const { return outer_blocks * inner_blocks; }

  // The number of the partial result that tile `index` contributes to its channels, and the
  // elements of each channel that it covers.
  int64_t PartialOf(int64_t index) const;
  int64_t Count(int64_t partial) const;

  // Tiles next to each other in memory have neighbouring numbers.
  Tile At(int64_t index) const;
};

// `layout` is not empty.
Partition Cut(const Layout& layout);

}  // namespace syncbn::cpu
