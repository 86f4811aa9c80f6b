// Device memory that operators give back, kept for the next ones.
// Who uses it: backend_cuda.cc. It must not know what the memory is for.
//
// A layer that is called imperatively has an operator for each call, so its memory has to outlive
// them if a step is to allocate nothing.
#pragma once
#include <cstddef>

namespace syncbn {
namespace cuda {

struct Piece {
  void* data = nullptr;
  size_t bytes = 0;
};

// On the current device, whose number is `ordinal`: a piece of at least this many bytes, with any
// contents. Pieces that nobody uses are freed first if none of them fits.
Piece TakePiece(int ordinal, size_t bytes);

// Nothing may still work on it, and it is empty afterwards. An empty one is ignored.
void GivePiece(int ordinal, Piece* piece);

}  // namespace cuda
}  // namespace syncbn
