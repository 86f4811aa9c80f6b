// Divides a tensor among blocks and threads, on the host and on the device.
//
// A tile is a group of adjacent channels, which one or more blocks share. There are two kinds of
// cuts. Planes: the tile is one channel, and all threads of a block traverse its planes (the inner
// elements) together. Columns, mainly for small planes and channels last: the threads of a block
// form rows and columns, and each thread traverses the outer axis. A slice is the part of a tile at
// one outer index. A line is the vectors of one channel or of one column. A vector has 16 bytes if
// all tensors are aligned to 16 bytes and planes (or, for columns, slices) are whole vectors.
// Otherwise it has one element.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/tensor.h"

namespace syncbn::cuda {

constexpr int kThreads = 128;  // per block
constexpr int kVectorBytes = 16;
constexpr int kMinPlane = 128;       // elements; smaller planes are always cut into columns
constexpr int kTileBytes = 128;      // most bytes in a slice of columns, if possible
constexpr int64_t kBlocksEach = 16;  // blocks per multiprocessor
constexpr int64_t kFewVectors = 8;   // blocks share a tile if a thread would have more vectors
constexpr int64_t kCounters = 8192;  // tiles that blocks can share, because each needs a counter
constexpr int64_t kMaxTileChannels = kTileBytes / 2;  // float16 has 2 bytes

// The vectors of one thread, numbered in its line: begin, begin + Cut::rows, ... below `end`.
struct Work {
  int64_t channel, begin, end;  // channel: the first channel of the tile
  int tile, split, channels;    // split: the number of the block among the blocks of the tile
  int offset;                   // elements of a slice before the thread's column
};

struct Cut {
  Layout layout;
  int width = 1, tile_channels = 1;  // elements of a vector, and channels of a tile
  bool columns = false;
  int rows = kThreads, row_threads = 1;  // rows of threads in a block, and threads in a row
  int64_t plane_vectors = 1;             // vectors in a plane; 1 for columns
  int64_t line = 0, step = 0;            // vectors in a line, and in a block's share of it
  int64_t tiles = 1, splits = 1;         // splits: blocks that share a tile

  SYNCBN_HOST_DEVICE Work At(unsigned block, int thread) const {
    Work work;
    work.tile = static_cast<int>(block % tiles);
    work.split = static_cast<int>(block / tiles);
    work.channel = static_cast<int64_t>(work.tile) * tile_channels;
    const int64_t left = layout.channels - work.channel;
    work.channels = static_cast<int>(left < tile_channels ? left : tile_channels);
    const int row = thread / row_threads;
    work.offset = thread % row_threads * width;
    const int64_t first = work.split * step, end = first + step < line ? first + step : line;
    const bool outside = row >= rows || (columns && work.offset >= work.channels * layout.inner);
    work.begin = first + row;
    work.end = outside ? 0 : end;
    return work;
  }

  // Returns the offset in the tensor, in elements, of vector i of the thread's line.
  SYNCBN_HOST_DEVICE int64_t OffsetOf(const Work& work, int64_t i) const {
    const int64_t plane =
        plane_vectors == 1 ? i : static_cast<int64_t>(uint64_t(i) / uint64_t(plane_vectors));
    const int64_t in_plane = (i - plane * plane_vectors) * width + work.offset;
    return (plane * layout.channels + work.channel) * layout.inner + in_plane;
  }

  SYNCBN_HOST_DEVICE int64_t ChannelOf(const Work& work, int in_vector) const {
    return columns ? work.channel + (work.offset + in_vector) / layout.inner : work.channel;
  }
};

// `bytes` is the size of an element. `aligned` is true if the addresses of all tensors are
// multiples of kVectorBytes.
inline Cut MakeCut(const Layout& layout, int bytes, bool aligned, int multiprocessors) {
  Cut cut;
  cut.layout = layout;
  const int64_t inner = std::max<int64_t>(layout.inner, 1);
  int64_t unit = 1;  // channels that together fill whole vectors
  for (int width : {aligned ? kVectorBytes / bytes : 1, 1}) {
    cut.width = width;
    for (unit = width; unit > 1 && unit / 2 * inner % width == 0;) unit /= 2;
    if (inner >= kMinPlane && unit == 1) break;
    cut.columns = layout.channels % unit == 0 && unit * inner <= kThreads * width;
    if (cut.columns) break;
  }
  if (cut.columns) {
    const int64_t units = layout.channels / unit;
    const int64_t most = std::max<int64_t>(kTileBytes / (unit * inner * bytes), 1);
    cut.tile_channels = static_cast<int>(CeilDiv(units, CeilDiv(units, most)) * unit);
    cut.row_threads = static_cast<int>(cut.tile_channels * inner / cut.width);
    cut.rows = kThreads / cut.row_threads;
  } else {
    cut.plane_vectors = inner / cut.width;
  }
  cut.tiles = CeilDiv(layout.channels, cut.tile_channels);
  if (layout.Size() == 0) return cut;
  cut.line = layout.outer * cut.plane_vectors;
  const int64_t most = cut.tiles > kCounters ? 1 : CeilDiv(cut.line, cut.rows * kFewVectors);
  cut.splits = std::clamp<int64_t>(kBlocksEach * multiprocessors / cut.tiles, 1, most);
  cut.step = CeilDiv(cut.line, cut.splits);
  cut.splits = CeilDiv(cut.line, cut.step);
  return cut;
}

}  // namespace syncbn::cuda
