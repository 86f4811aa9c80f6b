// The kernels on a smaller tensor (outer, kept channels, inner).
#include "op/kept_channels.h"

#include <utility>

namespace syncbn {

void KeptChannels::Keep(const Tensor& x, const Layout& layout, std::vector<int64_t> channels) {
  if (channels.empty() && !channels_.empty()) backend_->FreeMemory();
  channels_ = std::move(channels);
  dtype_ = x.dtype;
  if (channels_.empty()) return;
  backend_->Gather(x, layout, channels_, Memory(Backend::Place::kX, layout).data);
}

void KeptChannels::BackwardSums(const Tensor& dy, const Layout& layout, const Recovery& from_x,
                                const double* mean, double* sum_dz, double* sum_dz_xmu) {
  if (channels_.empty()) return;
  const Tensor kept_dy = Memory(Backend::Place::kDy, layout);
  backend_->Gather(dy, layout, channels_, kept_dy.data);
  const std::vector<double> scale = Select(from_x.scale), offset = Select(from_x.offset);
  const Recovery recovery{from_x.activation, false, scale.data(), offset.data()};
  std::vector<double> dz(channels_.size()), dz_xmu(channels_.size());
  backend_->BackwardSums(Memory(Backend::Place::kX, layout), kept_dy, Compact(layout), recovery,
                         Select(mean).data(), dz.data(), dz_xmu.data());
  for (size_t k = 0; k < channels_.size(); ++k) {
    sum_dz[channels_[k]] = dz[k];
    sum_dz_xmu[channels_[k]] = dz_xmu[k];
  }
}

void KeptChannels::BackwardApply(const Layout& layout, const Recovery& from_x, const double* mean,
                                 const double* a, const double* b, const double* d,
                                 Request request, const Tensor& dx) {
  if (channels_.empty()) return;
  const Tensor kept_dx = Memory(Backend::Place::kDx, layout);
  if (request == Request::kAdd) backend_->Gather(dx, layout, channels_, kept_dx.data);
  const std::vector<double> scale = Select(from_x.scale), offset = Select(from_x.offset);
  const Recovery recovery{from_x.activation, false, scale.data(), offset.data()};
  backend_->BackwardApply(Memory(Backend::Place::kX, layout), Memory(Backend::Place::kDy, layout),
                          Compact(layout), recovery, Select(mean).data(), Select(a).data(),
                          Select(b).data(), Select(d).data(), request, kept_dx);
}

void KeptChannels::WriteTo(const Tensor& dx, const Layout& layout) {
  if (channels_.empty()) return;
  backend_->Scatter(Memory(Backend::Place::kDx, layout).data, layout, channels_, dx);
}

std::vector<double> KeptChannels::Select(const double* values) const {
  std::vector<double> selected;
  for (int64_t c : channels_) selected.push_back(values[c]);
  return selected;
}

Layout KeptChannels::Compact(const Layout& layout) const {
  return {layout.outer, static_cast<int64_t>(channels_.size()), layout.inner};
}

Tensor KeptChannels::Memory(Backend::Place place, const Layout& layout) {
  const size_t bytes = static_cast<size_t>(Compact(layout).Size()) * SizeOf(dtype_);
  return {backend_->Memory(place, bytes), {}, dtype_};
}

}  // namespace syncbn
