// Divides a tensor among blocks and threads, on the host and on the device.
//
// A tile is a group of adjacent channels, which one or more blocks share. There are two kinds of
// cuts. Planes: the tile is one channel, and all threads of a block traverse its planes (the inner
// elements) together. Columns, for small planes and channels last: the threads of a block form rows
// and columns, and each thread traverses the outer axis. A slice is the part of a tile at one outer
// index. A line is the vectors of one channel or of one column.
//
// A vector has 16 bytes if all tensors are aligned to 16 bytes and, for columns, slices are whole
// vectors. Otherwise it has one element. Vectors are aligned, also where a plane begins or ends
// within a vector. Then the plane has only some of the vector's elements.
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

// A thread's next vector. It carries the plane, because dividing takes longer than a load.
struct Walk {
  int64_t i, end;    // the vector's number in the line
  int64_t plane;     // elements of the tensor before the plane, or before the column's vector
  int64_t in_plane;  // vectors of the plane before this one
};

// The beginning of a vector, and a bit for each of its elements that the thread must use.
struct Place {
  int64_t at;
  unsigned elements;
};

struct Cut {
  Layout layout;
  int width = 1, tile_channels = 1;  // elements of a vector, and channels of a tile
  bool columns = false;
  bool has_edges = false;                // planes may begin or end within a vector
  int rows = kThreads, row_threads = 1;  // rows of threads in a block, and threads in a row
  int64_t plane_vectors = 1;             // most vectors that a plane touches; 1 for columns
  int64_t line = 0, step = 0;            // vectors in a line, and in a block's share of it
  int64_t tiles = 1, splits = 1;         // splits: blocks that share a tile

  SYNCBN_HOST_DEVICE Work At(unsigned block, int thread) const {
    Work work;
    const unsigned blocks = static_cast<unsigned>(tiles);
    work.tile = static_cast<int>(block % blocks);
    work.split = static_cast<int>(block / blocks);
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

  SYNCBN_HOST_DEVICE Walk Begin(const Work& work) const {
    const int64_t outer = Divide(work.begin, plane_vectors);
    const int64_t plane = (outer * layout.channels + work.channel) * layout.inner + work.offset;
    return {work.begin, work.end, plane, work.begin - outer * plane_vectors};
  }

  // Returns the place of the next vector, and advances. Behind the last vector there are no
  // elements. kWidth is `width`.
  template <int kWidth>
  SYNCBN_HOST_DEVICE Place Take(Walk* walk) const {
    constexpr unsigned kAll = (1u << kWidth) - 1;
    Place place{walk->plane + walk->in_plane * kWidth, walk->i < walk->end ? kAll : 0};
    if (kWidth > 1 && has_edges) {
      const int before = static_cast<int>(walk->plane & (kWidth - 1));
      place.at -= before;
      if (walk->in_plane == 0) place.elements &= kAll << before;
      const int64_t left = walk->plane + layout.inner - place.at;
      if (left < kWidth) place.elements &= left > 0 ? (1u << left) - 1 : 0;
    }
    walk->i += rows;
    walk->plane += rows_planes;
    walk->in_plane += rows_in_plane;
    if (walk->in_plane >= plane_vectors) {
      walk->in_plane -= plane_vectors;
      walk->plane += layout.channels * layout.inner;
    }
    return place;
  }

  // Sets channels[j] to the channel of element j of the thread's vectors.
  template <int kChannels>
  SYNCBN_HOST_DEVICE void ChannelsOf(const Work& work, int64_t (&channels)[kChannels]) const {
    const unsigned inner = static_cast<unsigned>(layout.inner);
    unsigned channel = columns ? static_cast<unsigned>(work.offset) / inner : 0;
    unsigned in_channel = columns ? static_cast<unsigned>(work.offset) - channel * inner : 0;
    for (int j = 0; j < kChannels; ++j) {
      channels[j] = work.channel + channel;
      if (++in_channel == inner) {
        in_channel = 0;
        ++channel;
      }
    }
  }

  // Steps of a row of vectors, set by MakeCut: elements of whole planes, and vectors.
  int64_t rows_planes = 0, rows_in_plane = 0;

 private:
  // Returns a / b, in 32 bits if they suffice, which is several times faster.
  SYNCBN_HOST_DEVICE static int64_t Divide(int64_t a, int64_t b) {
    if (b == 1) return a;
    if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
    return a / b;
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
    if (inner >= kMinPlane) break;
    for (unit = width; unit > 1 && unit / 2 * inner % width == 0;) unit /= 2;
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
    cut.has_edges = inner % cut.width != 0;
    // A plane touches most vectors if it begins at a vector's last element.
    cut.plane_vectors = CeilDiv(inner + (cut.has_edges ? cut.width - 1 : 0), cut.width);
  }
  cut.tiles = CeilDiv(layout.channels, cut.tile_channels);
  if (layout.Size() == 0) return cut;
  cut.rows_planes = cut.rows / cut.plane_vectors * layout.channels * inner;
  cut.rows_in_plane = cut.rows % cut.plane_vectors;
  cut.line = layout.outer * cut.plane_vectors;
  const int64_t most = cut.tiles > kCounters ? 1 : CeilDiv(cut.line, cut.rows * kFewVectors);
  cut.splits = std::clamp<int64_t>(kBlocksEach * multiprocessors / cut.tiles, 1, most);
  cut.step = CeilDiv(cut.line, cut.splits);
  cut.splits = CeilDiv(cut.line, cut.step);
  return cut;
}

}  // namespace syncbn::cuda
