// The layer's arithmetic between the kernels' passes. Per-channel numbers are double throughout.
#include "op/sync_batch_norm.h"

#include <cmath>
#include <limits>
#include <utility>

#include "collective/registry.h"
#include "core/error.h"
#include "op/recovery.h"
#include "op/reducers.h"

namespace syncbn {
namespace {

std::vector<double> InverseStd(const std::vector<double>& var, double epsilon) {
  std::vector<double> inv_std(var.size());
  for (size_t c = 0; c < var.size(); ++c) inv_std[c] = 1.0 / std::sqrt(var[c] + epsilon);
  return inv_std;
}

std::vector<double> Product(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> product(a.size());
  for (size_t c = 0; c < a.size(); ++c) product[c] = a[c] * b[c];
  return product;
}

}  // namespace

SyncBatchNorm::SyncBatchNorm(const Options& options, const Device& device,
                             std::shared_ptr<Group> group, std::unique_ptr<Backend> backend)
    : options_(options),
      device_(device),
      group_(std::move(group)),
      backend_(std::move(backend)),
      kept_(backend_.get()) {}

// A device whose runtime fails can never meet the others, so they are told at once.
template <typename Body>
void SyncBatchNorm::OnBackend(const char* operation, const Tensor& x,
                              std::initializer_list<const Tensor*> vectors, const Body& body) {
  const Layout layout = LayoutOf(x);
  try {
    backend_->Begin(layout, vectors);
    body(layout);
    backend_->Finish();
  } catch (const DeviceError& error) {
    backend_->Abandon();
    const std::string text = Concat("SyncBatchNorm '", group_->layer(), "', ", operation, " on ",
                                    device_.Name(), ": ", error.what());
    group_->Fail(text);
    throw Error(text);
  } catch (...) {
    backend_->Abandon();
    throw;
  }
}

void SyncBatchNorm::Forward(bool training, const Tensor& x, const Tensor& gamma,
                            const Tensor& beta, Request y_request, const Tensor& y,
                            const Tensor& running_mean, const Tensor& running_var) {
  const auto compute = [&](const Layout& layout) {
    ComputeForward(layout, training, x, gamma, beta, y_request, y, running_mean, running_var);
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

void SyncBatchNorm::ComputeForward(const Layout& layout, bool training, const Tensor& x,
                                   const Tensor& gamma, const Tensor& beta, Request y_request,
                                   const Tensor& y, const Tensor& running_mean,
                                   const Tensor& running_var) {
  batch_statistics_ = training && !options_.use_global_stats;
  if (batch_statistics_) {
    ticket_ = group_->BeginForward(device_, static_cast<size_t>(options_.num_devices));
    backward_calls_ = 0;
    const Statistics batch = ReduceMoments(x, layout);
    count_ = batch.count;
    mean_ = batch.mean;
    inv_std_ = InverseStd(batch.var, options_.epsilon);
    UpdateRunning(batch, running_mean, running_var);
  } else {
    mean_ = backend_->Read(running_mean);
    inv_std_ = InverseStd(backend_->Read(running_var), options_.epsilon);
  }
  const std::vector<double> gammas = GammaOf(gamma);
  scale_ = Product(gammas, inv_std_);
  offset_ = backend_->Read(beta);
  if (y_request != Request::kNull) {
    backend_->Normalize(x, layout, mean_.data(), scale_.data(), offset_.data(),
                        options_.activation, y_request, y);
  }
  if (options_.from_output) {  // y never is in place of x: the operator does not declare it
    kept_.Keep(x, layout, Unrecoverable(layout, gammas, y_request, y));
  }
}

// The channels whose x y does not give back: all, if y is not this call's alone.
std::vector<int64_t> SyncBatchNorm::Unrecoverable(const Layout& layout,
                                                  const std::vector<double>& gamma,
                                                  Request y_request, const Tensor& y) {
  const double infinity = std::numeric_limits<double>::infinity();
  std::vector<double> bounds(gamma.size(), infinity), found(gamma.size(), 0.0);
  if (y_request == Request::kWrite) {
    bounds = RecoverableFrom(gamma, offset_, options_.activation, y.dtype);
    if (options_.activation.function == Function::kElu) {
      backend_->FindBelow(y, layout, bounds.data(), found.data());
    }
  }
  std::vector<int64_t> channels;
  for (size_t c = 0; c < gamma.size(); ++c) {
    if (found[c] > 0 || bounds[c] == infinity) channels.push_back(static_cast<int64_t>(c));
  }
  return channels;
}

// With g = gamma * inv_std and sums over the whole batch of `count` elements per channel:
// dx = g * (dz - sum_dz / count - (x - mean) * inv_std^2 * sum_dz_xmu / count)
// Kernels that read y take u = (x - mean) * g for x - mean.
void SyncBatchNorm::ComputeBackward(const Layout& layout, const Tensor& dy, const Tensor& t,
                                    const Gradients& out) {
  const size_t channels = static_cast<size_t>(layout.channels);
  // MXNet skips the backward of a failed forward only if no other operator took its exception.
  if (mean_.size() != channels) {
    throw Error(Concat("SyncBatchNorm '", group_->layer(), "', backward: the forward call that it "
                       "belongs to has failed. ", group_->Failure()));
  }
  const bool from_y = options_.from_output;
  const Recovery from_x{options_.activation, false, scale_.data(), offset_.data()};
  const Recovery recovery = from_y ? Recovery{options_.activation, true, nullptr, nullptr} : from_x;
  const double* const center = from_y ? offset_.data() : mean_.data();
  std::vector<double> unit(channels, 1.0);  // u in units of x
  for (size_t c = 0; c < channels && from_y; ++c) unit[c] = scale_[c];

  Payload sums(2 * channels);  // sum_dz, then sum_dz_xmu
  double *const sum_dz = sums.data(), *const sum_dz_xmu = sums.data() + channels;
  backend_->BackwardSums(t, dy, layout, recovery, center, sum_dz, sum_dz_xmu);
  for (size_t c = 0; c < channels; ++c) sum_dz_xmu[c] /= unit[c];
  if (from_y) kept_.BackwardSums(dy, layout, from_x, mean_.data(), sum_dz, sum_dz_xmu);

  const std::vector<double> dbeta(sum_dz, sum_dz + channels);
  backend_->Write(dbeta, out.dbeta_request, out.dbeta);
  std::vector<double> dgamma(channels, 0.0);
  for (size_t c = 0; c < channels && !options_.fix_gamma; ++c) dgamma[c] = sum_dz_xmu[c] * inv_std_[c];
  backend_->Write(dgamma, out.dgamma_request, out.dgamma);

  const std::vector<double>& a = scale_;
  std::vector<double> b(channels, 0.0), d(channels, 0.0);
  if (batch_statistics_) {
    // A device that needs no gradient of x takes part all the same: the others need its sums.
    const auto total = Exchange("backward", t, layout, std::move(sums), Sum,
                                "sum_float64");
    for (size_t c = 0; c < channels && count_ > 0; ++c) {
      d[c] = -a[c] * (*total)[c] / count_;
      b[c] = -a[c] * inv_std_[c] * inv_std_[c] * (*total)[channels + c] / count_;
    }
  }
  if (out.dx_request == Request::kNull) return;
  const auto apply = [&](const std::vector<double>& of_u) {
    backend_->BackwardApply(t, dy, layout, recovery, center, a.data(), of_u.data(), d.data(),
                            out.dx_request, out.dx);
  };
  if (!from_y) return apply(b);
  kept_.BackwardApply(layout, from_x, mean_.data(), a.data(), b.data(), d.data(), out.dx_request,
                      out.dx);
  for (size_t c = 0; c < channels; ++c) b[c] /= unit[c];
  apply(b);
  kept_.WriteTo(out.dx, layout);
}

SyncBatchNorm::Statistics SyncBatchNorm::ReduceMoments(const Tensor& x, const Layout& layout) {
  const size_t channels = static_cast<size_t>(layout.channels);
  Payload moments(1 + 2 * channels);
  moments[0] = static_cast<double>(layout.PerChannel());
  backend_->LocalMoments(x, layout, moments.data() + 1, moments.data() + 1 + channels);

  const auto total = Exchange("forward", x, layout, std::move(moments), MergeMoments,
                              "moments");
  Statistics batch;
  batch.count = (*total)[0];
  batch.mean.assign(total->begin() + 1, total->begin() + 1 + channels);
  batch.var.assign(total->begin() + 1 + channels, total->end());
  for (double& value : batch.var) value = batch.count > 0 ? value / batch.count : 0.0;
  return batch;
}

void SyncBatchNorm::UpdateRunning(const Statistics& batch, const Tensor& running_mean,
                                  const Tensor& running_var) const {
  if (batch.count == 0) return;
  double keep = options_.momentum;
  if (options_.cumulative) {
    const double before = static_cast<double>(group_->BatchesBefore(ticket_));
    keep = before / (before + 1);
  }
  // One element has no unbiased variance; its biased one is 0.
  const double correction = options_.unbiased_running_var && batch.count > 1
                                ? batch.count / (batch.count - 1) : 1.0;
  std::vector<double> mean = backend_->Read(running_mean);
  std::vector<double> var = backend_->Read(running_var);
  for (size_t c = 0; c < mean.size(); ++c) {
    mean[c] = keep * mean[c] + (1 - keep) * batch.mean[c];
    var[c] = keep * var[c] + (1 - keep) * batch.var[c] * correction;
  }
  backend_->Write(mean, Request::kWrite, running_mean);
  backend_->Write(var, Request::kWrite, running_var);
}

std::shared_ptr<const Payload> SyncBatchNorm::Exchange(const char* operation, const Tensor& x,
                                                       const Layout& layout, Payload payload,
                                                       Reducer reducer, const char* merger) {
  Across across;
  across.processes = Processes();
  if (options_.num_devices == 1 && across.processes == nullptr) {
    group_->Check(ticket_, operation, device_);  // another device may call the layer as well
    return std::make_shared<const Payload>(std::move(payload));
  }
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
