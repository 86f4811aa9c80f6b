// Per-channel numbers are double throughout.
//
// Forward, over the whole batch of `count` elements per channel:
//   mean = sum(x) / count, m2 = sum((x - mean)^2), var = m2 / count
//   inv_std = 1 / sqrt(var + epsilon), scale = gamma * inv_std
//   y = f(z), z = (x - mean) * scale + beta
//
// Backward, with dz = dy * f'(z) and xmu = x - mean:
//   dbeta = sum_dz, dgamma = sum_dz_xmu * inv_std, of this device's shard; then over the batch
//   dx = scale * (dz - sum_dz / count - xmu * inv_std^2 * sum_dz_xmu / count)
//      = scale * dz + scale_xmu * xmu + shift
#include "op/sync_batch_norm.h"

#include <cmath>
#include <utility>

#include "core/error.h"
#include "core/moments.h"
#include "op/reconstruction.h"

namespace syncbn {

SyncBatchNorm::SyncBatchNorm(const Options& options, const Device& device,
                             std::shared_ptr<Layer> layer, std::unique_ptr<Backend> backend)
    : options_(options),
      device_(device),
      layer_(std::move(layer)),
      name_(layer_->members.layer),
      backend_(std::move(backend)) {}

bool SyncBatchNorm::TakesBatch(bool training) const {
  return training || layer_->collected.IsActive();
}

// ---- forward -----------------------------------------------------------------------------------

void SyncBatchNorm::Forward(bool training, const ForwardTensors& tensors) {
  by_batch_ = TakesBatch(training);
  forward_.reset();
  std::vector<const Tensor*> vectors{&tensors.gamma, &tensors.beta, &tensors.running_mean,
                                     &tensors.running_var};
  if (options_.masked) vectors.push_back(&tensors.rows);
  ForBackward left;
  OnBackend("forward", tensors.x, vectors, [&](Layout layout) {
    if (options_.masked) layout.outer = left.rows = ValidRows(layout, tensors.rows);
    if (by_batch_) {
      ForwardByBatch(layout, tensors, &left);
    } else {
      ForwardByRunning(layout, tensors, &left);
    }
    KeepInputIfNeeded(layout, tensors, &left);
  });
  forward_ = std::move(left);
}

// For training batches, and those that are collected.
void SyncBatchNorm::ForwardByBatch(const Layout& layout, const ForwardTensors& tensors,
                                   ForBackward* left) {
  const size_t channels = static_cast<size_t>(layout.channels);
  BatchMoments own{static_cast<double>(layout.PerChannel()), std::vector<double>(channels),
                   std::vector<double>(channels)};
  ReductionPass pass;
  pass.dtype = tensors.x.dtype;
  pass.layout = layout;
  pass.in = tensors.x.data;
  pass.first = own.mean.data();
  pass.second = own.m2.data();
  backend_->LocalMoments(pass);

  CheckFinite(own, Concat("the shard of ", device_.Name()), "", tensors);
  const BatchMoments batch = Merge(tensors.x, own, &left->ticket);
  CheckFinite(batch, "the whole batch", ", though that of each shard is", tensors);
  TakeStatistics(left->ticket, batch, tensors);
  left->count = batch.count;
  left->mean = batch.mean;
  std::vector<double> var(channels);
  for (size_t c = 0; c < channels; ++c) var[c] = batch.count > 0 ? batch.m2[c] / batch.count : 0;
  SetScale(var, tensors, left);
  Normalize(layout, tensors, *left);
}

// For prediction.
void SyncBatchNorm::ForwardByRunning(const Layout& layout, const ForwardTensors& tensors,
                                     ForBackward* left) {
  left->mean = backend_->Read(tensors.running_mean);
  SetScale(backend_->Read(tensors.running_var), tensors, left);
  Normalize(layout, tensors, *left);
}

void SyncBatchNorm::SetScale(const std::vector<double>& var, const ForwardTensors& tensors,
                             ForBackward* left) const {
  left->scale = options_.fix_gamma ? std::vector<double>(var.size(), 1.0)
                                   : backend_->Read(tensors.gamma);
  left->offset = backend_->Read(tensors.beta);
  left->inv_std.resize(var.size());
  left->spread.resize(var.size());
  for (size_t c = 0; c < var.size(); ++c) {
    left->inv_std[c] = InvStd(var[c], options_.epsilon);
    left->scale[c] *= left->inv_std[c];
    left->spread[c] = std::fabs(left->scale[c]) * std::sqrt(var[c]);
  }
}

void SyncBatchNorm::Normalize(const Layout& layout, const ForwardTensors& tensors,
                              const ForBackward& by) {
  if (tensors.y_mode == WriteMode::kNull) return;
  ElementwisePass pass;
  pass.dtype = tensors.x.dtype;
  pass.layout = layout;
  pass.in = tensors.x.data;
  pass.activation = options_.activation;
  pass.mode = tensors.y_mode;
  pass.out = tensors.y.data;
  pass.mean = by.mean.data();
  pass.scale = by.scale.data();
  pass.offset = by.offset.data();
  backend_->Normalize(pass);
}

// ---- backward ----------------------------------------------------------------------------------

void SyncBatchNorm::Backward(const Tensor& dy, const Tensor& saved, const Gradients& out) {
  // MXNet skips the backward of a failed forward only until the error has been raised.
  if (!forward_) {
    throw Error(Concat("SyncBatchNorm '", name_, "', backward: the forward call that it belongs to "
                       "has failed. ", Table::Get().Failure()));
  }
  OnBackend("backward", saved, {}, [&](Layout layout) {
    ForBackward& forward = *forward_;
    if (options_.masked) layout.outer = forward.rows;
    const PassInput input = InputOf(layout, dy, saved);
    const size_t channels = forward.mean.size();
    GradientSums sums{std::vector<double>(channels), std::vector<double>(channels)};
    ReductionPass reduction;
    static_cast<PassInput&>(reduction) = input;
    reduction.first = sums.dz.data();
    reduction.second = sums.dz_xmu.data();
    backend_->BackwardSums(reduction);
    WriteParameterGradients(sums, out);

    // Also where no gradient of x is needed: the other devices need this one's sums.
    if (by_batch_) sums = Add(saved, sums, &forward.ticket, forward.calls++);
    if (out.dx_mode == WriteMode::kNull) return;

    // Zeros where the statistics did not depend on x.
    std::vector<double> scale_xmu(channels), shift(channels);
    for (size_t c = 0; c < channels && forward.count > 0; ++c) {
      const double inv_std = forward.inv_std[c];
      shift[c] = -forward.scale[c] * sums.dz[c] / forward.count;
      scale_xmu[c] = -forward.scale[c] * inv_std * inv_std * sums.dz_xmu[c] / forward.count;
    }
    ElementwisePass pass;
    static_cast<PassInput&>(pass) = input;
    pass.scale_xmu = scale_xmu.data();
    pass.shift = shift.data();
    pass.mode = out.dx_mode;
    pass.out = out.dx.data;
    backend_->BackwardApply(pass);
  });
}

// x or y, as MXNet has kept it, or our copy of x where y does not suffice.
PassInput SyncBatchNorm::InputOf(const Layout& layout, const Tensor& dy,
                                     const Tensor& saved) const {
  PassInput input;
  input.dtype = saved.dtype;
  input.layout = layout;
  input.in = forward_->keeps_x ? forward_->kept_x : saved.data;
  input.dy = dy.data;
  input.activation = options_.activation;
  input.from_output = options_.from_output && !forward_->keeps_x;
  input.mean = forward_->mean.data();
  input.scale = forward_->scale.data();
  input.offset = forward_->offset.data();
  return input;
}

void SyncBatchNorm::WriteParameterGradients(const GradientSums& sums, const Gradients& out) {
  backend_->Write(sums.dz, out.dbeta_mode, out.dbeta);
  std::vector<double> dgamma(sums.dz.size(), 0.0);
  for (size_t c = 0; c < dgamma.size() && !options_.fix_gamma; ++c) {
    dgamma[c] = sums.dz_xmu[c] * forward_->inv_std[c];
  }
  backend_->Write(dgamma, out.dgamma_mode, out.dgamma);
}

// ---- the exchange ------------------------------------------------------------------------------

BatchMoments SyncBatchNorm::Merge(const Tensor& x, const BatchMoments& own, Ticket* ticket) {
  Numbers numbers{own.count};
  numbers.insert(numbers.end(), own.mean.begin(), own.mean.end());
  numbers.insert(numbers.end(), own.m2.begin(), own.m2.end());
  numbers = AllReduce(Phase::kForward, x, Operation::kMoments, 0, std::move(numbers), ticket);
  const auto m2 = numbers.end() - static_cast<std::ptrdiff_t>(own.m2.size());
  return {numbers[0], {numbers.begin() + 1, m2}, {m2, numbers.end()}};
}

GradientSums SyncBatchNorm::Add(const Tensor& saved, const GradientSums& own, Ticket* ticket,
                                int64_t repeat) {
  Numbers numbers = own.dz;
  numbers.insert(numbers.end(), own.dz_xmu.begin(), own.dz_xmu.end());
  numbers = AllReduce(Phase::kBackward, saved, Operation::kSum, repeat, std::move(numbers), ticket);
  const auto middle = numbers.begin() + static_cast<std::ptrdiff_t>(own.dz.size());
  return {{numbers.begin(), middle}, {middle, numbers.end()}};
}

Numbers SyncBatchNorm::AllReduce(Phase phase, const Tensor& x, Operation operation, int64_t repeat,
                                 Numbers own, Ticket* ticket) {
  const size_t axis = options_.axis < 0 ? options_.axis + x.shape.size() : options_.axis;
  Contribution contribution;
  contribution.phase = phase;
  contribution.members = &layer_->members;
  contribution.device = device_;
  contribution.shape = x.shape;
  contribution.repeat = repeat;
  contribution.signature = {operation, x.dtype, x.shape[axis], options_.axis, options_.epsilon, ""};
  contribution.numbers = std::move(own);
  contribution.devices = static_cast<size_t>(options_.num_devices);
  contribution.expected = &options_.contexts;
  contribution.ranks = options_.ranks;
  contribution.shared_name = options_.shared_name;
  contribution.timeout_seconds = options_.timeout > 0 ? options_.timeout : default_timeout.load();
  return Table::Get().Contribute(contribution, ticket);
}

void SyncBatchNorm::Fail(const std::string& text) {
  // Prediction exchanges nothing, so nobody waits.
  const bool is_across = by_batch_ && options_.ranks.size() != 1;
  Table::Get().Fail(text, is_across);
  throw Error(text);
}

// ---- beside the two ----------------------------------------------------------------------------

// Updates the running statistics, or collects the batch's.
void SyncBatchNorm::TakeStatistics(const Ticket& ticket, const BatchMoments& batch,
                                   const ForwardTensors& tensors) {
  const bool is_skipped = options_.nonfinite == NonFinite::kSkip &&
                          !FirstNonFinite(batch, options_, tensors.running_mean,
                                          tensors.running_var).empty();
  if (is_skipped) return;
  if (layer_->collected.IsActive()) {
    layer_->collected.Add(ticket.number, batch.count, batch.mean, batch.m2,
                          options_.unbiased_running_var);
  } else {
    UpdateRunning(batch, options_, name_, backend_.get(), tensors.running_mean,
                  tensors.running_var);
  }
}

void SyncBatchNorm::CheckFinite(const BatchMoments& moments, const std::string& whose,
                                const std::string& beside, const ForwardTensors& tensors) {
  if (options_.nonfinite != NonFinite::kRaise) return;
  const std::string channel =
      FirstNonFinite(moments, options_, tensors.running_mean, tensors.running_var);
  if (channel.empty()) return;
  Fail(Concat("SyncBatchNorm '", name_, "', forward: the mean or variance of channel ", channel,
              " of ", whose, " is not finite in ", Name(tensors.running_var.dtype), beside));
}

int64_t SyncBatchNorm::ValidRows(const Layout& layout, const Tensor& rows) const {
  const std::vector<double> counts = backend_->Read(rows);
  const double count = counts.empty() ? 0 : counts[0];
  if (count >= 0 && count <= static_cast<double>(layout.outer)) return static_cast<int64_t>(count);
  throw DeviceError(Concat("\"rows\" counts ", count, " valid rows, but data has ", layout.outer));
}

// Keeps x where backward would read y but cannot reconstruct every channel's x_hat from it.
void SyncBatchNorm::KeepInputIfNeeded(const Layout& layout, const ForwardTensors& tensors,
                                      ForBackward* left) {
  if (!options_.from_output) return;
  left->keeps_x =
      tensors.y_mode != WriteMode::kWrite ||  // then y is not this call's alone
      !CanReconstruct(left->spread, left->offset, options_.activation, tensors.y.dtype);
  if (left->keeps_x) {  // y never is in place of x: the operator does not declare it
    const size_t bytes = static_cast<size_t>(layout.Size()) * SizeOf(tensors.x.dtype);
    left->kept_x = backend_->Keep(tensors.x.data, bytes);
  } else {
    backend_->Forget();
  }
}

// A device that fails never arrives, so the others are told at once. So are other
// processes, which may wait for an exchange that this process has not begun. The table tells them
// of its own errors, which are plain ones.
template <typename Body>
void SyncBatchNorm::OnBackend(const char* phase, const Tensor& x,
                              const std::vector<const Tensor*>& vectors, const Body& body) {
  const int ndim = static_cast<int>(x.shape.size());
  const int axis = options_.axis < 0 ? options_.axis + ndim : options_.axis;
  const Layout layout = MakeLayout(x.shape.data(), ndim, axis);
  try {
    for (const Tensor* vector : vectors) {  // a symbol from a file can be bound to other shapes
      if (vector->shape == std::vector<int64_t>{layout.channels}) continue;
      throw DeviceError(Concat("parameters and running statistics must have the shape (",
                               layout.channels, "), got ", ShapeText(vector->shape)));
    }
    backend_->Begin(layout, vectors);
    body(layout);
    backend_->Finish();
  } catch (const std::exception& error) {
    backend_->Abandon();
    const bool is_plain = dynamic_cast<const Error*>(&error) != nullptr &&
                          dynamic_cast<const DeviceError*>(&error) == nullptr;
    if (is_plain) throw;
    Fail(Concat("SyncBatchNorm '", name_, "', ", phase, " on ", device_.Name(), ": ",
                error.what()));
  }
}

}  // namespace syncbn
