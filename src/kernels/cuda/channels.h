// Some channels of a tensor, copied side by side and back: the mirror of cpu/channels_cpu.h.
// Who uses it: op/cuda. Like batch_norm_cuda.h: pointers, sizes and a stream.
#pragma once
#include <cstdint>

#include "kernels/cuda/batch_norm_cuda.h"

namespace syncbn::cuda {

// Channels of a tensor: `count` numbers, as doubles in memory that the device can reach, like
// all per-channel vectors.
struct ChannelList {
  const double* channels;
  int64_t count;
};

// compact[:, k, :] = tensor[:, channels[k], :]; `layout` is that of `tensor`.
void GatherChannels(DType dtype, const void* tensor, const Layout& layout, const ChannelList& list,
                    void* compact, Stream stream);

// tensor[:, channels[k], :] = compact[:, k, :]
void ScatterChannels(DType dtype, const void* compact, const Layout& layout,
                     const ChannelList& list, void* tensor, Stream stream);

}  // namespace syncbn::cuda
