// The kept channels lie side by side in the backend's memory.
#include "op/kept_channels.h"

#include <utility>

namespace syncbn {

void KeptChannels::Keep(const Tensor& x, const Layout& layout, std::vector<int64_t> channels) {
  if (channels.empty() && !channels_.empty()) backend_->FreeMemory();
  channels_ = std::move(channels);
  dtype_ = x.dtype;
  if (channels_.empty()) return;
  backend_->Gather(dtype_, x.data, layout, channels_, Memory(Backend::Place::kX, layout));
}

void KeptChannels::BackwardSums(const SumsPass& whole) {
  if (channels_.empty()) return;
  backend_->Gather(dtype_, whole.dy, whole.layout, channels_,
                   Memory(Backend::Place::kDy, whole.layout));
  std::vector<double> sum_dz(channels_.size()), sum_dz_u(channels_.size());
  SumsPass kept = whole;
  Narrow(&kept);
  kept.sum_dz = sum_dz.data();
  kept.sum_dz_u = sum_dz_u.data();
  backend_->BackwardSums(kept);
  for (size_t k = 0; k < channels_.size(); ++k) {
    whole.sum_dz[channels_[k]] = sum_dz[k];
    whole.sum_dz_u[channels_[k]] = sum_dz_u[k];
  }
}

void KeptChannels::BackwardApply(const ApplyPass& whole) {
  if (channels_.empty()) return;
  const std::vector<double> a = Select(whole.a), b = Select(whole.b), d = Select(whole.d);
  ApplyPass kept = whole;
  Narrow(&kept);
  kept.a = a.data();
  kept.b = b.data();
  kept.d = d.data();
  kept.dx = Memory(Backend::Place::kDx, whole.layout);
  if (whole.request == Request::kAdd) {
    backend_->Gather(dtype_, whole.dx, whole.layout, channels_, kept.dx);
  }
  backend_->BackwardApply(kept);
}

void KeptChannels::WriteTo(const ApplyPass& whole) {
  if (channels_.empty()) return;
  backend_->Scatter(dtype_, Memory(Backend::Place::kDx, whole.layout), whole.layout, channels_,
                    whole.dx);
}

void KeptChannels::Narrow(BackwardInput* input) {
  mean_ = Select(input->mean);
  scale_ = Select(input->scale);
  offset_ = Select(input->offset);
  input->t = Memory(Backend::Place::kX, input->layout);
  input->dy = Memory(Backend::Place::kDy, input->layout);
  input->mean = mean_.data();
  input->scale = scale_.data();
  input->offset = offset_.data();
  input->layout.channels = static_cast<int64_t>(channels_.size());
}

std::vector<double> KeptChannels::Select(const double* values) const {
  std::vector<double> selected;
  for (int64_t c : channels_) selected.push_back(values[c]);
  return selected;
}

void* KeptChannels::Memory(Backend::Place place, const Layout& whole) {
  const size_t elements = static_cast<size_t>(whole.PerChannel()) * channels_.size();
  return backend_->Memory(place, elements * SizeOf(dtype_));
}

}  // namespace syncbn
