// Forward of the layer, from the batch's moments to y:
//
// mean = sum(x) / count, m2 = sum((x - mean)^2), var = m2 / count, over the whole batch
// inv_std = 1 / sqrt(var + epsilon), scale = gamma * inv_std
// y = f((x - mean) * scale + beta)
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/moments.h"
#include "op/single_value.h"
#include "op/sync_batch_norm.h"

namespace syncbn {
namespace {

// The least size of y / x_hat, below which digits are lost where |x_hat| is about 1.
double SmallestScale(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return std::numeric_limits<double>::min() / std::numeric_limits<double>::epsilon();
    case DType::kFloat16: return 0x1p-14;  // conversions never flush its subnormal numbers
    default: return std::numeric_limits<float>::min() / std::numeric_limits<float>::epsilon();
  }
}

// True if a channel's x_hat can be reconstructed from y = f(gamma * x_hat + beta) to about y's
// precision. y is rounded by a factor of 1 + u, so z = f^-1(y) errs by u |z|, and x_hat = (z -
// beta) / gamma by u (|x_hat| + |beta / gamma|): no more than a few units of x_hat if |beta| is not
// much larger than |gamma|. And y must not fall among the numbers that the dtype holds with fewer
// digits, or, float32 arithmetic being allowed to flush them to zero, not at all.
bool CanReconstruct(double gamma, double beta, const Activation& activation, DType dtype) {
  constexpr double kLargestShift = 8;  // of |beta / gamma|: u |x_hat| + 8 u are lost of x_hat
  const bool has_slope = activation.function != Function::kIdentity;
  const double least = SmallestScale(dtype) / (has_slope ? std::min(1.0, activation.slope) : 1.0);
  const double size = std::fabs(gamma);
  return size >= least && std::fabs(beta) <= kLargestShift * size;  // false where one is NaN
}

// The number of the first channel whose moments are not finite, as text; empty for none.
std::string FirstNonFinite(const std::vector<double>& mean, const std::vector<double>& m2) {
  for (size_t c = 0; c < mean.size(); ++c) {
    if (!std::isfinite(mean[c]) || !std::isfinite(m2[c])) return std::to_string(c);
  }
  return "";
}

// What has no weight is forgotten, even if it is not finite.
double WeightedSum(double keep, double old, double batch) {
  if (keep == 0) return batch;
  return keep == 1 ? old : keep * old + (1 - keep) * batch;
}

}  // namespace

int64_t SyncBatchNorm::ValidRows(const Layout& layout, const ForwardTensors& of) const {
  const std::vector<double> counts = backend_->Read(of.rows);
  const double rows = counts.empty() ? 0 : counts[0];
  if (rows >= 0 && rows <= static_cast<double>(layout.outer)) return static_cast<int64_t>(rows);
  throw DeviceError(Concat("\"rows\" counts ", rows, " valid rows, but data has ", layout.outer));
}

// For training batches, and those that are collected.
void SyncBatchNorm::NormalizeByBatch(const Layout& layout, const ForwardTensors& of) {
  ticket_ = group_->BeginForward(device_, static_cast<size_t>(options_.num_devices));
  backward_calls_ = 0;
  mean_.resize(static_cast<size_t>(layout.channels));
  std::vector<double> count{static_cast<double>(layout.PerChannel())};
  std::vector<double> m2(mean_.size()), var(mean_.size());
  backend_->LocalMoments({of.x.dtype, layout, of.x.data, mean_.data(), m2.data()});
  const bool raises = options_.nonfinite == NonFinite::kRaise;
  const std::string own_fault = raises ? FirstNonFinite(mean_, m2) : "";
  if (Synchronizes()) {
    Exchange("forward", of.x, layout, ReduceOperation::kMoments, {&count, &mean_, &m2});
  } else {
    group_->Check(ticket_, "forward", device_);  // another device may call the layer as well
  }
  count_ = count[0];
  for (size_t c = 0; c < var.size(); ++c) var[c] = count_ > 0 ? m2[c] / count_ : 0;
  if (options_.nonfinite != NonFinite::kPropagate && !FirstNonFinite(mean_, m2).empty()) {
    if (raises) RaiseNonFinite(own_fault, of.x, layout);
  } else if (layer_->collected.IsActive()) {
    layer_->collected.Add(ticket_.number, count_, mean_, m2, options_.unbiased_running_var);
  } else {
    UpdateRunning(var, of);
  }
  SetScale(var, of);
  Normalize(layout, of);
}

// For prediction.
void SyncBatchNorm::NormalizeByRunning(const Layout& layout, const ForwardTensors& of) {
  // On a GPU reading waits, so y comes first.
  const bool is_done = of.y_request != Request::kNull &&
                       backend_->Predict({of.x.dtype, layout, of.x.data, nullptr, nullptr, nullptr,
                                          options_.activation, of.y_request, of.y.data},
                                         {of.running_mean, of.running_var, of.beta,
                                          options_.fix_gamma ? nullptr : &of.gamma,
                                          options_.epsilon});
  mean_ = backend_->Read(of.running_mean);
  SetScale(backend_->Read(of.running_var), of);
  if (!is_done) Normalize(layout, of);
}

// By mean_, scale_ and offset_.
void SyncBatchNorm::Normalize(const Layout& layout, const ForwardTensors& of) {
  if (of.y_request == Request::kNull) return;
  backend_->Normalize({of.x.dtype, layout, of.x.data, mean_.data(), scale_.data(), offset_.data(),
                       options_.activation, of.y_request, of.y.data});
}

void SyncBatchNorm::SetScale(const std::vector<double>& var, const ForwardTensors& of) {
  gamma_ = options_.fix_gamma ? std::vector<double>(var.size(), 1.0) : backend_->Read(of.gamma);
  offset_ = backend_->Read(of.beta);
  inv_std_.resize(var.size());
  scale_.resize(var.size());
  for (size_t c = 0; c < var.size(); ++c) {
    inv_std_[c] = InvStd(var[c], options_.epsilon);
    scale_[c] = gamma_[c] * inv_std_[c];
  }
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

// All devices have the same batch, so all come here. Each tells whether its own shard is to blame:
// `own` names the channel, and is empty if it is not.
void SyncBatchNorm::RaiseNonFinite(const std::string& own, const Tensor& x, const Layout& layout) {
  std::string shards;  // in the order of ranks and devices
  if (!own.empty()) {
    shards = Concat(own, " of the shard of ", device_.Name());
    if (Processes() != nullptr) shards += Concat(" on rank ", Processes()->rank());
    shards += '\n';
  }
  if (Synchronizes()) {
    AllReduceOptions options = OptionsFor("forward", x, layout);
    options.repeat = 1;
    options.contribution.operation = ReduceOperation::kConcat;
    options.arrival.payload.assign(shards.begin(), shards.end());
    const auto all = group_->AllReduce(std::move(options));
    shards.assign(all->payload.begin(), all->payload.end());
  }
  const std::string first = shards.substr(0, shards.find('\n'));
  FailEverywhere(Concat("SyncBatchNorm '", group_->layer(), "', forward: ",
                        first.empty() ? "the mean or variance of the whole batch"
                                      : "the mean or variance of channel " + first,
                        " is not finite, in call ", ticket_.number + 1, " of the layer"));
}

void SyncBatchNorm::UpdateRunning(const std::vector<double>& batch_var,
                                  const ForwardTensors& of) const {
  if (count_ == 0) return;
  if (count_ == 1) NoteSingleValue(group_->layer());
  const double keep = options_.momentum;
  // One element has no unbiased variance; its biased one is 0.
  const double correction = options_.unbiased_running_var && count_ > 1
                                ? count_ / (count_ - 1) : 1.0;
  std::vector<double> mean = backend_->Read(of.running_mean);
  std::vector<double> var = backend_->Read(of.running_var);
  for (size_t c = 0; c < mean_.size(); ++c) {
    mean[c] = WeightedSum(keep, mean[c], mean_[c]);
    var[c] = WeightedSum(keep, var[c], batch_var[c] * correction);
  }
  backend_->Write(mean, Request::kWrite, of.running_mean);
  backend_->Write(var, Request::kWrite, of.running_var);
}

}  // namespace syncbn
