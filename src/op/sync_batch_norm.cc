// Forward, over the whole batch of `count` elements per channel:
//   mean = sum(x) / count, m2 = sum((x - mean)^2), var = m2 / count
//   inv_std = 1 / sqrt(var + epsilon), scale = gamma * inv_std
//   y = f(z), z = (x - mean) * scale + beta
//
// Backward, with dz = dy * f'(z) and xmu = x - mean. The sums for dbeta and dgamma are over this
// device's shard, and the sums for dx are over the whole batch.
//   dbeta = sum_dz, dgamma = sum_dz_xmu * inv_std
//   dx = scale * (dz - sum_dz / count - xmu * inv_std^2 * sum_dz_xmu / count)
//      = scale * dz + scale_xmu * xmu + shift
#include "op/sync_batch_norm.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/error.h"

namespace syncbn {
namespace {

// Returns the smallest spread (standard deviation) of y for which the error of an element that
// underflows is at most the dtype's epsilon times the spread.
double SmallestSpread(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return std::numeric_limits<double>::min() / std::numeric_limits<double>::epsilon();
    case DType::kFloat16: return 0x1p-14;  // subnormal numbers are rounded, not flushed to zero
    default: return std::numeric_limits<float>::min() / std::numeric_limits<float>::epsilon();
  }
}

double Largest(DType dtype) {
  if (dtype == DType::kFloat64) return std::numeric_limits<double>::max();
  return dtype == DType::kFloat16 ? 65504 : std::numeric_limits<float>::max();
}

// Returns true if backward can compute z - beta from y in every channel. The error must be small
// compared with `spread`, the standard deviation of z over the batch. If u is the relative rounding
// error of y, z = f^-1(y) has an error of at most u |z|, so |beta| must not be much larger than
// `spread`. SmallestSpread limits the error of elements of y that underflow. If the slope is above
// 1, y may overflow although z does not. No element of a batch deviates from the mean by more than
// `spread` * sqrt(count); a count of 0 stands for an unknown distribution.
bool CanReconstruct(const std::vector<double>& spread, const std::vector<double>& beta,
                    double count, const Activation& activation, DType dtype) {
  constexpr double kMaxShift = 8;  // limits |beta| / spread
  const double slope = activation.function == Function::kIdentity ? 1 : activation.slope;
  if (slope > 1 && count == 0) return false;
  const double min = SmallestSpread(dtype) / std::min(1.0, slope);
  const double max = slope > 1 ? Largest(dtype) / slope : std::numeric_limits<double>::infinity();
  for (size_t c = 0; c < spread.size(); ++c) {
    const bool suffices = spread[c] >= min && std::fabs(beta[c]) <= kMaxShift * spread[c] &&
                          std::fabs(beta[c]) + spread[c] * std::sqrt(count) <= max;
    if (!suffices) return false;  // also for NaN
  }
  return true;
}

}  // namespace

SyncBatchNorm::SyncBatchNorm(const Options& options, const Device& device,
                             std::shared_ptr<Layer> layer, std::unique_ptr<Backend> backend)
    : options_(options),
      device_(device),
      layer_(std::move(layer)),
      name_(layer_->members.layer),
      backend_(std::move(backend)) {}

bool SyncBatchNorm::UsesBatch(bool training) const {
  return training || layer_->collected.IsActive();  // active in recompute_statistics
}

void SyncBatchNorm::Forward(bool training, const ForwardTensors& tensors) {
  used_batch_ = UsesBatch(training);
  forward_.reset();
  std::vector<const Tensor*> vectors{&tensors.gamma, &tensors.beta, &tensors.running_mean,
                                     &tensors.running_var};
  if (options_.masked) vectors.push_back(&tensors.rows);
  ForwardState state;
  OnBackend("forward", tensors.x, vectors, [&](Layout layout) {
    if (options_.masked) layout.outer = state.valid_rows = ValidRows(layout, tensors.rows);
    if (used_batch_) {
      SetScale(ReduceBatch(layout, tensors, &state), tensors, &state);
    } else {
      state.mean = backend_->Read(tensors.running_mean);
      SetScale(backend_->Read(tensors.running_var), tensors, &state);
    }
    if (tensors.y_mode != WriteMode::kNull) {
      ElementwisePass pass{InputOf(layout, tensors.x, state)};
      pass.mode = tensors.y_mode;
      pass.out = tensors.y.data;
      backend_->Normalize(pass);
    }
    KeepInputIfNeeded(layout, tensors, &state);
  });
  forward_ = std::move(state);
}

std::vector<double> SyncBatchNorm::ReduceBatch(const Layout& layout, const ForwardTensors& tensors,
                                               ForwardState* state) {
  const size_t channels = static_cast<size_t>(layout.channels);
  BatchMoments own{Numbers(1 + 2 * channels)};
  own.numbers[0] = static_cast<double>(layout.PerChannel());
  ReductionPass pass{InputOf(layout, tensors.x, *state)};
  pass.first = own.numbers.data() + 1;
  pass.second = pass.first + channels;
  backend_->LocalMoments(pass);

  CheckFinite(own, &device_, tensors);
  const BatchMoments batch{
      AllReduce(Phase::kForward, tensors.x, std::move(own.numbers), &state->ticket)};
  CheckFinite(batch, nullptr, tensors);
  const bool is_skipped =
      options_.nonfinite == NonFinite::kSkip &&
      FirstNonFinite(batch, options_, tensors.running_mean, tensors.running_var);
  if (!is_skipped && layer_->collected.IsActive()) {
    layer_->collected.Add(state->ticket.number, batch);
  } else if (!is_skipped) {
    UpdateRunning(batch, options_, name_, backend_.get(), tensors.running_mean,
                  tensors.running_var);
  }
  state->count = batch.count();
  state->mean.resize(channels);
  std::vector<double> var(channels);
  for (size_t c = 0; c < channels; ++c) {
    state->mean[c] = batch.mean(c);
    var[c] = batch.count() > 0 ? batch.m2(c) / batch.count() : 0;
  }
  return var;
}

void SyncBatchNorm::SetScale(const std::vector<double>& var, const ForwardTensors& tensors,
                             ForwardState* state) const {
  state->scale =
      options_.fix_gamma ? std::vector<double>(var.size(), 1.0) : backend_->Read(tensors.gamma);
  state->offset = backend_->Read(tensors.beta);
  state->inv_std.resize(var.size());
  state->spread.resize(var.size());
  for (size_t c = 0; c < var.size(); ++c) {
    state->inv_std[c] = 1 / std::sqrt(var[c] + options_.epsilon);
    state->scale[c] *= state->inv_std[c];
    state->spread[c] = std::fabs(state->scale[c]) * std::sqrt(var[c]);
  }
}

PassInput SyncBatchNorm::InputOf(const Layout& layout, const Tensor& tensor,
                                 const ForwardState& state) const {
  PassInput input;
  input.dtype = tensor.dtype;
  input.layout = layout;
  input.in = tensor.data;
  input.activation = options_.activation;
  input.mean = state.mean.data();
  input.scale = state.scale.data();
  input.offset = state.offset.data();
  return input;
}

void SyncBatchNorm::Backward(const Tensor& dy, const Tensor& saved, const Gradients& out) {
  // MXNet runs backward after a failed forward if the program has read the error.
  if (!forward_) {
    throw Error(Concat("SyncBatchNorm '", name_, "', backward: its forward call must have ",
                       "succeeded, but it failed. ", Table::Get().Failure()));
  }
  OnBackend("backward", saved, {}, [&](Layout layout) {
    ForwardState& forward = *forward_;
    if (options_.masked) layout.outer = forward.valid_rows;
    PassInput input = InputOf(layout, saved, forward);
    input.dy = dy.data;
    if (forward.keeps_x) input.in = forward.kept_x;
    input.from_output = options_.from_output && !forward.keeps_x;
    const size_t channels = forward.mean.size();
    Numbers sums(2 * channels);  // sums of dz, then of dz * xmu
    ReductionPass reduction{input};
    reduction.first = sums.data();
    reduction.second = sums.data() + channels;
    backend_->BackwardSums(reduction);
    backend_->Write(sums.data(), out.dbeta_mode, out.dbeta);
    std::vector<double> dgamma(channels);
    for (size_t c = 0; c < channels && !options_.fix_gamma; ++c) {
      dgamma[c] = sums[channels + c] * forward.inv_std[c];
    }
    backend_->Write(dgamma.data(), out.dgamma_mode, out.dgamma);

    if (used_batch_) {  // also if this device needs no dx, because others wait for its sums
      sums = AllReduce(Phase::kBackward, saved, std::move(sums), &forward.ticket);
    }
    if (out.dx_mode == WriteMode::kNull) return;

    std::vector<double> scale_xmu(channels), shift(channels);
    for (size_t c = 0; c < channels && forward.count > 0; ++c) {
      const double inv_std = forward.inv_std[c];
      shift[c] = -forward.scale[c] * sums[c] / forward.count;
      // inv_std^3 would underflow or overflow before the sum balances it.
      scale_xmu[c] = -(forward.scale[c] * inv_std) * (inv_std * sums[channels + c]) / forward.count;
    }
    ElementwisePass pass{input};
    pass.scale_xmu = scale_xmu.data();
    pass.shift = shift.data();
    pass.mode = out.dx_mode;
    pass.out = out.dx.data;
    backend_->BackwardApply(pass);
  });
}

Numbers SyncBatchNorm::AllReduce(Phase phase, const Tensor& x, Numbers own, Ticket* ticket) {
  const size_t axis = options_.axis < 0 ? options_.axis + x.shape.size() : options_.axis;
  const Operation operation = phase == Phase::kForward ? Operation::kMoments : Operation::kSum;
  Contribution contribution;
  contribution.phase = phase;
  contribution.members = &layer_->members;
  contribution.device = device_;
  contribution.shape = x.shape;
  contribution.signature = {operation, x.dtype, x.shape[axis], options_.axis, options_.epsilon};
  contribution.numbers = std::move(own);
  contribution.devices = static_cast<size_t>(options_.num_devices);
  contribution.expected = &options_.contexts;
  contribution.ranks = options_.ranks;
  contribution.shared_name = options_.shared_name;
  contribution.timeout_seconds = options_.timeout > 0 ? options_.timeout : default_timeout.load();
  return Table::Get().Contribute(std::move(contribution), ticket);
}

void SyncBatchNorm::Fail(const std::string& text) {
  const bool ranks_wait = used_batch_ && options_.ranks.size() != 1;
  Table::Get().Fail(text, ranks_wait);
  throw Error(text);
}

void SyncBatchNorm::CheckFinite(const BatchMoments& moments, const Device* shard,
                                const ForwardTensors& tensors) {
  if (options_.nonfinite != NonFinite::kRaise) return;
  const auto channel = FirstNonFinite(moments, options_, tensors.running_mean, tensors.running_var);
  if (!channel) return;
  Fail(Concat("SyncBatchNorm '", name_, "', forward: the mean or variance of channel ", *channel,
              " of ", shard != nullptr ? "the shard of " + shard->Name() : "the whole batch",
              " is not finite in ", Name(tensors.running_var.dtype),
              shard != nullptr ? "" : ", although each shard has finite ones"));
}

int64_t SyncBatchNorm::ValidRows(const Layout& layout, const Tensor& rows) const {
  const std::vector<double> counts = backend_->Read(rows);
  const double count = counts.empty() ? 0 : counts[0];  // equal for all channels
  if (count >= 0 && count <= static_cast<double>(layout.outer)) return static_cast<int64_t>(count);
  throw DeviceError(
      Concat("the number of valid rows must be from 0 to ", layout.outer, ", got ", count));
}

void SyncBatchNorm::KeepInputIfNeeded(const Layout& layout, const ForwardTensors& tensors,
                                      ForwardState* state) {
  if (!options_.from_output) return;
  state->keeps_x =
      tensors.y_mode != WriteMode::kWrite ||  // y was not written, or was added to other values
      !CanReconstruct(state->spread, state->offset, state->count, options_.activation,
                      tensors.y.dtype);
  if (state->keeps_x) {  // x still exists, because MXNet gives y other memory
    const size_t bytes = static_cast<size_t>(layout.Size()) * SizeOf(tensors.x.dtype);
    state->kept_x = backend_->Keep(tensors.x.data, bytes);
  } else {
    backend_->Forget();
  }
}

// Runs `body` between Begin and Finish of the backend. An exception ends the waits of other devices
// and ranks. Table and Fail throw an Error after they have ended these waits.
template <typename Body>
void SyncBatchNorm::OnBackend(const char* phase, const Tensor& x,
                              const std::vector<const Tensor*>& vectors, const Body& body) {
  const int ndim = static_cast<int>(x.shape.size());
  const int axis = options_.axis < 0 ? options_.axis + ndim : options_.axis;
  const Layout layout = MakeLayout(x.shape.data(), ndim, axis);
  try {
    for (const Tensor* vector : vectors) {  // a graph may be bound to parameters of other shapes
      if (vector->shape == std::vector<int64_t>{layout.channels}) continue;
      throw DeviceError(Concat("parameters and other vectors must have the shape (",
                               layout.channels, "), got ", ShapeText(vector->shape)));
    }
    backend_->Begin(layout, vectors);
    body(layout);
    backend_->Finish();
  } catch (const Error&) {
    backend_->Abandon();
    throw;
  } catch (const std::exception& error) {
    backend_->Abandon();
    Fail(
        Concat("SyncBatchNorm '", name_, "', ", phase, " on ", device_.Name(), ": ", error.what()));
  }
}

}  // namespace syncbn
