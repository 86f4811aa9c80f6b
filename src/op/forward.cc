// Forward of the layer, from the batch's moments to y:
//
// mean = sum(x) / count, m2 = sum((x - mean)^2), var = m2 / count, over the whole batch
// inv_std = 1 / sqrt(var + epsilon), scale = gamma * inv_std
// y = f((x - mean) * scale + beta)
#include <cmath>
#include <utility>

#include "op/reconstruction.h"
#include "op/sync_batch_norm.h"

namespace syncbn {

void SyncBatchNorm::ComputeForward(const Layout& layout, const ForwardTensors& of) {
  const size_t channels = static_cast<size_t>(layout.channels);
  for (auto* numbers : {&mean_, &inv_std_, &scale_}) numbers->resize(channels);
  if (!batch_statistics_) {
    ForwardFromRunning(layout, of);
  } else {
    ticket_ = group_->BeginForward(device_, static_cast<size_t>(options_.num_devices));
    backward_calls_ = 0;
    count_ = static_cast<double>(layout.PerChannel());
    ForwardFromBatch(layout, of);
  }
  KeepInputIfNeeded(layout, of);
}

void SyncBatchNorm::ForwardFromRunning(const Layout& layout, const ForwardTensors& of) {
  mean_ = backend_->Read(of.running_mean);
  const std::vector<double> var = backend_->Read(of.running_var);
  ReadParameters(of);
  SetScale(var);
  if (of.y_request != Request::kNull) backend_->Normalize(NormalizationOf(layout, of));
}

// On a GPU reading waits, so the parameters are read after the pass over x, which waits anyway.
void SyncBatchNorm::ForwardFromBatch(const Layout& layout, const ForwardTensors& of) {
  std::vector<double> m2(mean_.size());
  backend_->LocalMoments({of.x.dtype, layout, of.x.data, mean_.data(), m2.data()});
  if (Synchronizes()) {
    Exchange("forward", of.x, layout, ReduceOperation::kMoments,
             {{&count_, 1}, {mean_.data(), mean_.size()}, {m2.data(), m2.size()}});
  } else {
    group_->Check(ticket_, "forward", device_);  // another device may call the layer as well
  }
  std::vector<double> var(m2.size(), 0.0);
  for (size_t c = 0; c < var.size() && count_ > 0; ++c) var[c] = m2[c] / count_;
  CollectedMoments& collected = history_->collected();
  if (collected.IsActive()) {
    collected.Add(ticket_.number, count_, mean_, m2, options_.unbiased_running_var);
  } else {
    UpdateRunning(var, of);
  }
  ReadParameters(of);
  SetScale(var);
  if (of.y_request != Request::kNull) backend_->Normalize(NormalizationOf(layout, of));
}

void SyncBatchNorm::ReadParameters(const ForwardTensors& of) {
  gamma_ = options_.fix_gamma ? std::vector<double>(mean_.size(), 1.0) : backend_->Read(of.gamma);
  offset_ = backend_->Read(of.beta);
}

void SyncBatchNorm::SetScale(const std::vector<double>& var) {
  for (size_t c = 0; c < var.size(); ++c) {
    inv_std_[c] = 1.0 / std::sqrt(var[c] + options_.epsilon);
    scale_[c] = gamma_[c] * inv_std_[c];
  }
}

NormalizePass SyncBatchNorm::NormalizationOf(const Layout& layout, const ForwardTensors& of) const {
  return {of.x.dtype,     layout,        of.x.data, mean_.data(), scale_.data(), offset_.data(),
          options_.activation, of.y_request, of.y.data};
}

// Keeps x where backward would read y but cannot reconstruct every channel's x_hat from it.
void SyncBatchNorm::KeepInputIfNeeded(const Layout& layout, const ForwardTensors& of) {
  if (!options_.from_output) return;
  bool can_reconstruct = of.y_request == Request::kWrite;  // else y is not this call's alone
  for (size_t c = 0; c < gamma_.size(); ++c) {
    can_reconstruct &= CanReconstruct(gamma_[c], offset_[c], options_.activation, of.y.dtype);
  }
  keeps_x_ = !can_reconstruct;
  if (keeps_x_) {  // y never is in place of x: the operator does not declare it
    kept_x_ = backend_->Keep(of.x.data, static_cast<size_t>(layout.Size()) * SizeOf(of.x.dtype));
  } else {
    backend_->Forget();
  }
}

void SyncBatchNorm::UpdateRunning(const std::vector<double>& batch_var,
                                  const ForwardTensors& of) const {
  if (count_ == 0) return;
  const int64_t batches = history_->CountBatch(ticket_.number);
  double keep = options_.momentum;
  if (options_.cumulative) keep = static_cast<double>(batches) / static_cast<double>(batches + 1);
  // One element has no unbiased variance; its biased one is 0.
  const double correction = options_.unbiased_running_var && count_ > 1
                                ? count_ / (count_ - 1) : 1.0;
  const bool is_float32 = of.running_mean.dtype == DType::kFloat32;
  const auto stored = [&](double value) { return is_float32 ? static_cast<float>(value) : value; };
  Statistics before{backend_->Read(of.running_mean), backend_->Read(of.running_var)};
  Statistics after = before;
  for (size_t c = 0; c < mean_.size(); ++c) {
    after.mean[c] = stored(keep * before.mean[c] + (1 - keep) * mean_[c]);
    after.var[c] = stored(keep * before.var[c] + (1 - keep) * batch_var[c] * correction);
  }
  backend_->Write(after.mean, Request::kWrite, of.running_mean);
  backend_->Write(after.var, Request::kWrite, of.running_var);
  history_->Note(device_, std::move(before), std::move(after));
}

}  // namespace syncbn
