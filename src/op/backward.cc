// Backward of the layer, from dy to dx. With dz = dy * f'(z), g = gamma * inv_std, and sums over
// the whole batch of `count` elements per channel:
//
// dx = g * (dz - sum_dz / count - (x - mean) * inv_std^2 * sum_dz_xmu / count)
//    = a * dz + b * (x - mean) + d, with a = g, the scale of forward
#include <cstddef>

#include "core/error.h"
#include "op/sync_batch_norm.h"

namespace syncbn {

void SyncBatchNorm::ComputeBackward(const Layout& layout, const Tensor& dy, const Tensor& t,
                                    const Gradients& out) {
  // MXNet skips the backward of a failed forward only until the error has been raised.
  if (!forward_succeeded_) {
    throw Error(Concat("SyncBatchNorm '", group_->layer(), "', backward: the forward call that it "
                       "belongs to has failed. ", group_->Failure()));
  }
  if (batch_statistics_ && !Synchronizes()) group_->Check(ticket_, "backward", device_);
  const BackwardInput input = InputOf(layout, dy, t);
  const size_t channels = mean_.size();
  std::vector<double> sums(2 * channels);  // sum_dz, then sum_dz_xmu
  backend_->BackwardSums({input, sums.data(), sums.data() + channels});
  WriteParameterGradients(sums, out);
  // Also where no gradient of x is needed: the other devices need this one's sums.
  if (Synchronizes()) Exchange("backward", t, layout, ReduceOperation::kSumFloat64, {&sums});
  if (out.dx_request == Request::kNull) return;
  // Zeros where the statistics did not depend on x.
  std::vector<double> b(channels), d(channels);
  for (size_t c = 0; c < channels && batch_statistics_ && count_ > 0; ++c) {
    d[c] = -scale_[c] * sums[c] / count_;
    b[c] = -scale_[c] * inv_std_[c] * inv_std_[c] * sums[channels + c] / count_;
  }
  backend_->BackwardApply(
      {input, scale_.data(), b.data(), d.data(), out.dx_request, out.dx.data});
}

// The kernels' input: x or y, as MXNet has kept it, or our copy of x where y does not suffice.
BackwardInput SyncBatchNorm::InputOf(const Layout& layout, const Tensor& dy,
                                     const Tensor& t) const {
  BackwardInput input{t.dtype, layout, t.data, dy.data, options_.activation, options_.from_output,
                      mean_.data(), scale_.data(), offset_.data()};
  if (keeps_x_) {
    input.t = kept_x_;
    input.from_output = false;
  }
  return input;
}

// dbeta and dgamma from this shard's sum_dz and sum_dz_xmu.
void SyncBatchNorm::WriteParameterGradients(const std::vector<double>& sums, const Gradients& out) {
  const size_t channels = inv_std_.size();
  const auto middle = sums.begin() + static_cast<std::ptrdiff_t>(channels);
  backend_->Write({sums.begin(), middle}, out.dbeta_request, out.dbeta);
  std::vector<double> dgamma(channels, 0.0);
  for (size_t c = 0; c < channels && !options_.fix_gamma; ++c) dgamma[c] = middle[c] * inv_std_[c];
  backend_->Write(dgamma, out.dgamma_request, out.dgamma);
}

}  // namespace syncbn
