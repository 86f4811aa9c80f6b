// Backward of the layer, from dy to dx. With dz = dy * f'(z), g = gamma * inv_std, and sums over
// the whole batch of `count` elements per channel:
//
// dx = g * (dz - sum_dz / count - (x - mean) * inv_std^2 * sum_dz_xmu / count)
//    = a * dz + b * (x - mean) + d, with a = g
//
// Kernels that read y compute u = (x - mean) * g in the place of x - mean.
#include <cstddef>

#include "core/error.h"
#include "op/sync_batch_norm.h"

namespace syncbn {

void SyncBatchNorm::ComputeBackward(const Layout& layout, const Tensor& dy, const Tensor& t,
                                    const Gradients& out) {
  // MXNet skips the backward of a failed forward only until somebody has caught its error.
  if (!forward_succeeded_) {
    throw Error(Concat("SyncBatchNorm '", group_->layer(), "', backward: the forward call that it "
                       "belongs to has failed. ", group_->Failure()));
  }
  if (batch_statistics_ && !Synchronizes()) group_->Check(ticket_, "backward", device_);
  const BackwardInput from_x{t.dtype, layout, t.data, dy.data, options_.activation, false,
                             mean_.data(), scale_.data(), offset_.data()};
  const size_t channels = mean_.size();
  const BackwardInput input = options_.from_output ? FromOutput(from_x) : from_x;
  std::vector<double> sums(2 * channels);  // sum_dz, then sum_dz_xmu
  backend_->BackwardSums({input, sums.data(), sums.data() + channels});
  ToUnitsOfX(&sums);
  kept_.BackwardSums({from_x, sums.data(), sums.data() + channels});
  WriteParameterGradients(sums, out);
  // A device that needs no gradient of x takes part all the same: the others need its sums.
  if (Synchronizes()) {
    Exchange("backward", t, layout, "sum_float64", {{sums.data(), sums.size()}});
  }
  if (out.dx_request == Request::kNull) return;
  Terms terms{std::vector<double>(channels, 0.0), std::vector<double>(channels, 0.0)};
  SetTerms(sums, &terms);
  const double *const a = scale_.data(), *const b = terms.b.data(), *const d = terms.d.data();
  const ApplyPass of_kept{from_x, a, b, d, out.dx_request, out.dx.data};
  kept_.BackwardApply(of_kept);
  ToUnitsOfU(&terms);
  backend_->BackwardApply({input, a, b, d, out.dx_request, out.dx.data});
  kept_.WriteTo(of_kept);
}

BackwardInput SyncBatchNorm::FromOutput(BackwardInput from_x) const {
  from_x.from_output = true;
  from_x.mean = offset_.data();
  from_x.scale = from_x.offset = nullptr;
  return from_x;
}

void SyncBatchNorm::ToUnitsOfX(std::vector<double>* sums) const {
  if (!options_.from_output) return;
  double* const sum_dz_xmu = sums->data() + scale_.size();
  for (size_t c = 0; c < scale_.size(); ++c) sum_dz_xmu[c] /= scale_[c];
}

void SyncBatchNorm::ToUnitsOfU(Terms* terms) const {
  if (!options_.from_output) return;
  for (size_t c = 0; c < scale_.size(); ++c) terms->b[c] /= scale_[c];
}

void SyncBatchNorm::SetTerms(const std::vector<double>& sums, Terms* terms) const {
  if (!batch_statistics_ || count_ == 0) return;
  const double *const sum_dz = sums.data(), *const sum_dz_xmu = sums.data() + scale_.size();
  const std::vector<double>& a = scale_;
  for (size_t c = 0; c < scale_.size(); ++c) {
    terms->d[c] = -a[c] * sum_dz[c] / count_;
    terms->b[c] = -a[c] * inv_std_[c] * inv_std_[c] * sum_dz_xmu[c] / count_;
  }
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
