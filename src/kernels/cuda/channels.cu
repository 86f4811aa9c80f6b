// One thread for each element of the compact tensor. An element is as many bytes, up to 16, as all
// runs of a channel consist of at both ends, whatever the dtype.
#include "kernels/cuda/channels.h"

#include "kernels/cuda/launch.h"
#include "kernels/cuda/numeric.h"

namespace syncbn::cuda {
namespace {

constexpr int kThreads = 256;

// From the tensor with this layout, in elements, to the compact one, or else back.
template <bool kGather, typename Element>
__global__ void CopyChannelsKernel(Layout layout, ChannelList list, const Element* from,
                                   Element* to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t run = i / layout.inner, outer = run / list.count;
  if (outer >= layout.outer) return;
  const int64_t channel = static_cast<int64_t>(list.channels[run - outer * list.count]);
  const int64_t at = (outer * layout.channels + channel) * layout.inner + i - run * layout.inner;
  to[kGather ? i : at] = from[kGather ? at : i];
}

template <bool kGather, typename Element>
void CopyElements(const char* name, const Layout& layout, const ChannelList& list,
                  const void* from, void* to, Stream stream) {
  const int64_t elements = layout.outer * list.count * layout.inner;
  Launch(name, CopyChannelsKernel<kGather, Element>, CeilDiv(elements, kThreads), kThreads, stream,
         layout, list, static_cast<const Element*>(from), static_cast<Element*>(to));
}

bool IsMultiple(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

template <bool kGather>
void CopyChannels(const char* name, DType dtype, const Layout& layout, const ChannelList& list,
                  const void* from, void* to, Stream stream) {
  if (layout.PerChannel() == 0 || list.count == 0) return;
  const int64_t run = layout.inner * static_cast<int64_t>(SizeOf(dtype));
  int64_t bytes = 16;
  while (run % bytes != 0 || !IsMultiple(from, bytes) || !IsMultiple(to, bytes)) bytes /= 2;
  const Layout of{layout.outer, layout.channels, run / bytes};
  const auto copy = [&](auto element) {
    CopyElements<kGather, decltype(element)>(name, of, list, from, to, stream);
  };
  switch (bytes) {
    case 16: return copy(Vector<uint32_t, 4>());
    case 8: return copy(uint64_t());
    case 4: return copy(uint32_t());
    default: return copy(uint16_t());
  }
}

}  // namespace

void GatherChannels(DType dtype, const void* tensor, const Layout& layout, const ChannelList& list,
                    void* compact, Stream stream) {
  CopyChannels<true>("GatherChannels", dtype, layout, list, tensor, compact, stream);
}

void ScatterChannels(DType dtype, const void* compact, const Layout& layout,
                     const ChannelList& list, void* tensor, Stream stream) {
  CopyChannels<false>("ScatterChannels", dtype, layout, list, compact, tensor, stream);
}

}  // namespace syncbn::cuda
