// The layer's arithmetic between the kernels' passes. Per-channel numbers are double throughout.
#include "op/sync_batch_norm.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "collective/registry.h"
#include "core/error.h"
#include "op/reconstruction.h"
#include "op/reducers.h"

namespace syncbn {

SyncBatchNorm::SyncBatchNorm(const Options& options, const Device& device,
                             std::shared_ptr<Group> group, std::unique_ptr<Backend> backend)
    : options_(options),
      device_(device),
      group_(std::move(group)),
      backend_(std::move(backend)),
      kept_(backend_.get()) {}

// A device whose runtime fails can never meet the others, so they are told at once: those of other
// processes, too, which may wait for a round that nobody has begun here.
template <typename Body>
void SyncBatchNorm::OnBackend(const char* operation, const Tensor& x,
                              std::initializer_list<const Tensor*> vectors, const Body& body) {
  const Layout layout = LayoutOf(x);
  ProcessGroup* const processes = batch_statistics_ ? Processes() : nullptr;
  try {
    backend_->Begin(layout, vectors);
    body(layout);
    backend_->Finish();
  } catch (const DeviceError& error) {
    backend_->Abandon();
    const std::string text = Concat("SyncBatchNorm '", group_->layer(), "', ", operation, " on ",
                                    device_.Name(), ": ", error.what());
    group_->Fail(text);
    if (processes != nullptr) processes->Fail(text);
    throw Error(text);
  } catch (...) {
    backend_->Abandon();
    throw;
  }
}

void SyncBatchNorm::Forward(bool training, const Tensor& x, const Tensor& gamma,
                            const Tensor& beta, Request y_request, const Tensor& y,
                            const Tensor& running_mean, const Tensor& running_var) {
  batch_statistics_ = training && !options_.use_global_stats;
  const auto compute = [&](const Layout& layout) {
    ComputeForward(layout, x, gamma, beta, y_request, y, running_mean, running_var);
  };
  try {
    OnBackend("forward", x, {&gamma, &beta, &running_mean, &running_var}, compute);
  } catch (...) {
    mean_.clear();  // which backward looks at
    throw;
  }
}

void SyncBatchNorm::Backward(const Tensor& dy, const Tensor& t, const Gradients& out) {
  OnBackend("backward", t, {},
            [&](const Layout& layout) { ComputeBackward(layout, dy, t, out); });
}

void SyncBatchNorm::ComputeForward(const Layout& layout, const Tensor& x, const Tensor& gamma,
                                   const Tensor& beta, Request y_request, const Tensor& y,
                                   const Tensor& running_mean, const Tensor& running_var) {
  const size_t channels = static_cast<size_t>(layout.channels);
  std::vector<double> gammas, var(channels);
  // On a GPU reading waits, so it comes behind the pass over x, which waits anyway.
  const auto read_parameters = [&] {
    gammas = GammaOf(gamma);
    offset_ = backend_->Read(beta);
    inv_std_.resize(channels);
    scale_.resize(channels);
  };
  const auto set_scale = [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      inv_std_[c] = 1.0 / std::sqrt(var[c] + options_.epsilon);
      scale_[c] = gammas[c] * inv_std_[c];
    }
  };
  double* const m2 = var.data();  // in whose place var comes
  const auto divide = [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) var[c] = count_ > 0 ? m2[c] / count_ : 0.0;
  };
  if (batch_statistics_) {
    ticket_ = group_->BeginForward(device_, static_cast<size_t>(options_.num_devices));
    backward_calls_ = 0;
    count_ = static_cast<double>(layout.PerChannel());
    mean_.resize(channels);
  }

  const bool alone = !MeetsOthers(), writes_y = y_request != Request::kNull;
  CachedPasses* const cached =
      batch_statistics_ && alone && writes_y ? backend_->cached_passes() : nullptr;
  if (cached != nullptr) {
    read_parameters();
    const auto between = [&](int64_t begin, int64_t end) {
      divide(begin, end);
      set_scale(begin, end);
    };
    cached->MomentsAndNormalize(x, layout, mean_.data(), m2, between, scale_.data(),
                                offset_.data(), options_.activation, y_request, y);
  } else if (batch_statistics_) {
    backend_->LocalMoments(x, layout, mean_.data(), m2);
    if (!alone) ExchangeMoments(x, layout, m2);
    divide(0, layout.channels);
  } else {
    mean_ = backend_->Read(running_mean);
    var = backend_->Read(running_var);
  }
  if (batch_statistics_) {
    // Another device may call the layer as well.
    if (alone) group_->Check(ticket_, "forward", device_);
    UpdateRunning(var, running_mean, running_var);
  }
  if (cached == nullptr) {
    read_parameters();
    set_scale(0, layout.channels);
    if (writes_y) {
      backend_->Normalize(x, layout, mean_.data(), scale_.data(), offset_.data(),
                          options_.activation, y_request, y);
    }
  }
  if (options_.from_output) {  // y never is in place of x: the operator does not declare it
    kept_.Keep(x, layout, NotReconstructible(gammas, y_request, y));
  }
}

// The channels whose x_hat cannot be reconstructed from y: all, if y is not this call's alone.
std::vector<int64_t> SyncBatchNorm::NotReconstructible(const std::vector<double>& gamma,
                                                       Request y_request, const Tensor& y) const {
  std::vector<int64_t> channels;
  for (size_t c = 0; c < gamma.size(); ++c) {
    if (y_request != Request::kWrite ||
        !CanReconstruct(gamma[c], offset_[c], options_.activation, y.dtype)) {
      channels.push_back(static_cast<int64_t>(c));
    }
  }
  return channels;
}

// With g = gamma * inv_std and sums over the whole batch of `count` elements per channel:
// dx = g * (dz - sum_dz / count - (x - mean) * inv_std^2 * sum_dz_xmu / count)
// Kernels that read y take u = (x - mean) * g for x - mean.
void SyncBatchNorm::ComputeBackward(const Layout& layout, const Tensor& dy, const Tensor& t,
                                    const Gradients& out) {
  const size_t channels = static_cast<size_t>(layout.channels);
  // MXNet skips the backward of a failed forward only until somebody has caught its error.
  if (mean_.size() != channels) {
    throw Error(Concat("SyncBatchNorm '", group_->layer(), "', backward: the forward call that it "
                       "belongs to has failed. ", group_->Failure()));
  }
  const bool from_y = options_.from_output;
  const Recovery from_x{options_.activation, false, scale_.data(), offset_.data()};
  const Recovery recovery = from_y ? Recovery{options_.activation, true, nullptr, nullptr} : from_x;
  const double* const center = from_y ? offset_.data() : mean_.data();
  std::vector<double> unit(channels, 1.0);  // u in units of x
  if (from_y) unit = scale_;

  Payload sums(2 * channels);  // sum_dz, then sum_dz_xmu
  double *const sum_dz = sums.data(), *const sum_dz_xmu = sums.data() + channels;
  const auto in_units_of_x = [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) sum_dz_xmu[c] /= unit[c];
  };
  const std::vector<double>& a = scale_;
  std::vector<double> b(channels, 0.0), d(channels, 0.0);
  const auto set_terms = [&](int64_t begin, int64_t end) {  // from the whole batch's sums
    if (!batch_statistics_ || count_ == 0) return;
    for (int64_t c = begin; c < end; ++c) {
      d[c] = -a[c] * sums[c] / count_;
      b[c] = -a[c] * inv_std_[c] * inv_std_[c] * sums[channels + c] / count_;
    }
  };
  const auto in_units_of_u = [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) b[c] /= unit[c];
  };

  const bool wants_dx = out.dx_request != Request::kNull;
  const bool alone = !MeetsOthers();
  if (batch_statistics_ && alone) group_->Check(ticket_, "backward", device_);
  CachedPasses* const cached =
      alone && kept_.empty() && wants_dx ? backend_->cached_passes() : nullptr;
  if (cached != nullptr) {
    const auto between = [&](int64_t begin, int64_t end) {
      in_units_of_x(begin, end);
      set_terms(begin, end);
      in_units_of_u(begin, end);
    };
    cached->SumsAndApply(t, dy, layout, recovery, center, sum_dz, sum_dz_xmu, between, a.data(),
                         b.data(), d.data(), out.dx_request, out.dx);
    return WriteParameterGradients(sums, out);
  }

  backend_->BackwardSums(t, dy, layout, recovery, center, sum_dz, sum_dz_xmu);
  in_units_of_x(0, layout.channels);
  kept_.BackwardSums(dy, layout, from_x, mean_.data(), sum_dz, sum_dz_xmu);
  WriteParameterGradients(sums, out);
  // A device that needs no gradient of x takes part all the same: the others need its sums.
  if (!alone) sums = *Exchange("backward", t, layout, std::move(sums), Sum, "sum_float64");
  if (!wants_dx) return;
  set_terms(0, layout.channels);
  kept_.BackwardApply(layout, from_x, mean_.data(), a.data(), b.data(), d.data(), out.dx_request,
                      out.dx);
  in_units_of_u(0, layout.channels);
  backend_->BackwardApply(t, dy, layout, recovery, center, a.data(), b.data(), d.data(),
                          out.dx_request, out.dx);
  kept_.WriteTo(out.dx, layout);
}

// dbeta and dgamma from this shard's sum_dz and sum_dz_xmu.
void SyncBatchNorm::WriteParameterGradients(const Payload& sums, const Gradients& out) {
  const size_t channels = inv_std_.size();
  const auto middle = sums.begin() + static_cast<std::ptrdiff_t>(channels);
  backend_->Write({sums.begin(), middle}, out.dbeta_request, out.dbeta);
  std::vector<double> dgamma(channels, 0.0);
  for (size_t c = 0; c < channels && !options_.fix_gamma; ++c) dgamma[c] = middle[c] * inv_std_[c];
  backend_->Write(dgamma, out.dgamma_request, out.dgamma);
}

// From this shard's moments to the whole batch's.
void SyncBatchNorm::ExchangeMoments(const Tensor& x, const Layout& layout, double* m2) {
  const size_t channels = static_cast<size_t>(layout.channels);
  Payload moments{count_};
  moments.reserve(1 + 2 * channels);
  moments.insert(moments.end(), mean_.begin(), mean_.end());
  moments.insert(moments.end(), m2, m2 + channels);
  const auto total = Exchange("forward", x, layout, std::move(moments), MergeMoments, "moments");
  count_ = total->front();
  std::copy_n(total->begin() + 1, channels, mean_.begin());
  std::copy_n(total->end() - static_cast<std::ptrdiff_t>(channels), channels, m2);
}

void SyncBatchNorm::UpdateRunning(const std::vector<double>& batch_var, const Tensor& running_mean,
                                  const Tensor& running_var) const {
  if (count_ == 0) return;
  double keep = options_.momentum;
  if (options_.cumulative) {
    const double before = static_cast<double>(group_->BatchesBefore(ticket_));
    keep = before / (before + 1);
  }
  // One element has no unbiased variance; its biased one is 0.
  const double correction = options_.unbiased_running_var && count_ > 1
                                ? count_ / (count_ - 1) : 1.0;
  std::vector<double> mean = backend_->Read(running_mean);
  std::vector<double> var = backend_->Read(running_var);
  for (size_t c = 0; c < mean.size(); ++c) {
    mean[c] = keep * mean[c] + (1 - keep) * mean_[c];
    var[c] = keep * var[c] + (1 - keep) * batch_var[c] * correction;
  }
  backend_->Write(mean, Request::kWrite, running_mean);
  backend_->Write(var, Request::kWrite, running_var);
}

std::shared_ptr<const Payload> SyncBatchNorm::Exchange(const char* operation, const Tensor& x,
                                                       const Layout& layout, Payload payload,
                                                       Reducer reducer, const char* merger) {
  Across across;
  across.processes = Processes();
  across.ranks = options_.ranks;
  across.name = options_.shared_name;
  across.contract = Concat("channels=", layout.channels, ", dtype=", Name(x.dtype), ", axis=",
                           options_.axis, ", epsilon=", options_.epsilon);
  across.merger = merger;
  Arrival arrival;
  arrival.contract = Concat(across.contract, ", num_devices=", options_.num_devices);
  arrival.shape = ShapeText(x.shape);
  arrival.payload = std::move(payload);
  RoundKey key{operation, ticket_.number, 0};
  if (key.operation == "backward") key.repeat = backward_calls_++;
  const Meeting meeting{static_cast<size_t>(options_.num_devices), options_.contexts,
                        options_.timeout > 0 ? options_.timeout : DefaultTimeout(),
                        std::move(across)};
  return group_->AllReduce(ticket_, key, device_, std::move(arrival), meeting, reducer);
}

// Whether the statistics are those of more than this device.
bool SyncBatchNorm::MeetsOthers() const {
  return batch_statistics_ && (options_.num_devices > 1 || Processes() != nullptr);
}

// The processes to synchronize with; null for none.
ProcessGroup* SyncBatchNorm::Processes() const {
  if (!options_.across_processes || options_.ranks.size() == 1) return nullptr;
  ProcessGroup* processes = TheProcessGroup();
  if (processes == nullptr && !options_.ranks.empty()) {
    throw Error(Concat("SyncBatchNorm '", group_->layer(), "': its group has ",
                       options_.ranks.size(), " ranks, but gluon_syncbn.distributed.init() was not "
                       "called in this process"));
  }
  return processes != nullptr && processes->size() > 1 ? processes : nullptr;
}

Layout SyncBatchNorm::LayoutOf(const Tensor& x) const {
  const int ndim = static_cast<int>(x.shape.size());
  const int axis = options_.axis < 0 ? options_.axis + ndim : options_.axis;
  if (axis < 0 || axis >= ndim) {
    throw Error(Concat("axis ", options_.axis, " is outside of an input of shape ",
                       ShapeText(x.shape)));
  }
  return MakeLayout(x.shape.data(), ndim, axis);
}

std::vector<double> SyncBatchNorm::GammaOf(const Tensor& gamma) const {
  if (!options_.fix_gamma) return backend_->Read(gamma);
  return std::vector<double>(static_cast<size_t>(gamma.shape.at(0)), 1.0);
}

}  // namespace syncbn
