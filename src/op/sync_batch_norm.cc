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

SyncBatchNorm::SyncBatchNorm(std::shared_ptr<Layer> layer, bool masked, const Device& device,
                             std::unique_ptr<Backend> backend)
    : layer_(std::move(layer)),
      masked_(masked),
      device_(device),
      options_(layer_->options()),
      name_(layer_->members.layer),
      backend_(std::move(backend)) {}

bool SyncBatchNorm::UsesBatch(bool training) const {
  return training || layer_->collected.IsActive();  // active in recompute_statistics
}

void SyncBatchNorm::BeginForward(bool training, const ForwardTensors& given) {
  options_ = layer_->options();
  used_batch_ = UsesBatch(training);
  phase_ = Phase::kForward;
  forward_.emplace();
  std::vector<const Tensor*> vectors{&given.gamma, &given.beta, &given.running_mean,
                                     &given.running_var};
  if (masked_) vectors.push_back(&given.rows);
  OnBackend([&] {
    Layout layout = LayoutOf(given.x);
    CheckVectors(layout, vectors);
    backend_->Begin(layout, vectors);
    ForwardTensors tensors = given;
    layout.block = given.y_mode == WriteMode::kNull ? given.x.block : given.y.block;
    tensors.x = InBlocks(layout, given.x);
    if (masked_) {
      layout.outer = forward_->valid_rows = ValidRows(layout, tensors.rows);
    }
    if (used_batch_) StartExchange(tensors.x, ShardMoments(layout, tensors));
    finish_ = [this, layout, tensors](Numbers reduced) {
      EndForward(layout, tensors, std::move(reduced));
    };
  });
}

Numbers SyncBatchNorm::ShardMoments(const Layout& layout, const ForwardTensors& tensors) {
  const size_t channels = static_cast<size_t>(layout.channels);
  BatchMoments own{Numbers(1 + 2 * channels)};
  own.numbers[0] = static_cast<double>(layout.PerChannel());
  ReductionPass pass{InputOf(layout, tensors.x)};
  pass.first = own.numbers.data() + 1;
  pass.second = pass.first + channels;
  backend_->LocalMoments(pass);
  CheckFinite(own, &device_, tensors);
  return std::move(own.numbers);
}

void SyncBatchNorm::EndForward(const Layout& layout, const ForwardTensors& tensors,
                               Numbers reduced) {
  if (used_batch_) {
    SetScale(BatchVariance({std::move(reduced)}, tensors), tensors);
  } else {
    forward_->mean = backend_->Read(tensors.running_mean);
    SetScale(backend_->Read(tensors.running_var), tensors);
  }
  if (tensors.y_mode != WriteMode::kNull) {
    ElementwisePass pass{InputOf(layout, tensors.x)};
    pass.mode = tensors.y_mode;
    pass.out = tensors.y.data;
    backend_->Normalize(pass);
  }
  KeepInputIfNeeded(layout, tensors);
}

std::vector<double> SyncBatchNorm::BatchVariance(const BatchMoments& batch,
                                                 const ForwardTensors& tensors) {
  CheckFinite(batch, nullptr, tensors);
  const bool is_skipped =
      options_->nonfinite == NonFinite::kSkip &&
      FirstNonFinite(batch, *options_, tensors.running_mean, tensors.running_var);
  if (!is_skipped && layer_->collected.IsActive()) {
    layer_->collected.Add(forward_->ticket.number, batch);
  } else if (!is_skipped) {
    UpdateRunning(batch, *options_, name_, backend_.get(), tensors.running_mean,
                  tensors.running_var);
  }
  forward_->count = batch.count();
  forward_->mean.resize(batch.channels());
  std::vector<double> var(batch.channels());
  for (size_t c = 0; c < batch.channels(); ++c) {
    forward_->mean[c] = batch.mean(c);
    var[c] = batch.count() > 0 ? batch.m2(c) / batch.count() : 0;
  }
  return var;
}

void SyncBatchNorm::SetScale(const std::vector<double>& var, const ForwardTensors& tensors) {
  ForwardState* const state = &*forward_;
  state->scale =
      options_->fix_gamma ? std::vector<double>(var.size(), 1.0) : backend_->Read(tensors.gamma);
  state->offset = backend_->Read(tensors.beta);
  state->inv_std.resize(var.size());
  state->spread.resize(var.size());
  for (size_t c = 0; c < var.size(); ++c) {
    state->inv_std[c] = 1 / std::sqrt(var[c] + options_->epsilon);
    state->scale[c] *= state->inv_std[c];
    state->spread[c] = std::fabs(state->scale[c]) * std::sqrt(var[c]);
  }
}

PassInput SyncBatchNorm::InputOf(const Layout& layout, const Tensor& tensor) const {
  PassInput input;
  input.dtype = tensor.dtype;
  input.layout = layout;
  input.in = tensor.data;
  input.activation = options_->activation;
  input.mean = forward_->mean.data();
  input.scale = forward_->scale.data();
  input.offset = forward_->offset.data();
  return input;
}

void SyncBatchNorm::BeginBackward(const Tensor& dy, const Tensor& saved, const Gradients& out) {
  // MXNet runs backward after a failed forward if the program has read the error.
  if (!forward_) {
    throw Error(Concat("SyncBatchNorm '", name_, "', backward: its forward call must have ",
                       "succeeded, but it failed. ", Table::Get().Failure()));
  }
  phase_ = Phase::kBackward;
  OnBackend([&] {
    Layout layout = LayoutOf(saved);
    backend_->Begin(layout, {});
    Tensor in = saved;
    if (forward_->keeps_x) {
      in.data = const_cast<void*>(forward_->kept_x);
      in.block = forward_->kept_block;
    }
    layout.block = out.dx_mode == WriteMode::kNull ? in.block : out.dx.block;
    const Tensor in_blocks = InBlocks(layout, in), dy_in_blocks = InBlocks(layout, dy);
    if (masked_) layout.outer = forward_->valid_rows;
    PassInput input = InputOf(layout, in_blocks);
    input.dy = dy_in_blocks.data;
    input.from_output = options_->from_output && !forward_->keeps_x;
    const size_t channels = forward_->mean.size();
    Numbers sums(2 * channels);  // sums of dz, then of dz * xmu
    ReductionPass reduction{input};
    reduction.first = sums.data();
    reduction.second = sums.data() + channels;
    backend_->BackwardSums(reduction);
    backend_->Write(sums.data(), out.dbeta_mode, out.dbeta);
    std::vector<double> dgamma(channels);
    for (size_t c = 0; c < channels && !options_->fix_gamma; ++c) {
      dgamma[c] = sums[channels + c] * forward_->inv_std[c];
    }
    backend_->Write(dgamma.data(), out.dgamma_mode, out.dgamma);

    // The exchange also takes place if this device needs no dx, because others wait for its sums.
    if (used_batch_) StartExchange(saved, std::move(sums));
    finish_ = [this, input, sums = std::move(sums), out](Numbers reduced) {
      if (out.dx_mode != WriteMode::kNull) WriteDx(input, used_batch_ ? reduced : sums, out);
    };
  });
}

void SyncBatchNorm::WriteDx(const PassInput& input, const Numbers& sums, const Gradients& out) {
  const ForwardState& forward = *forward_;
  const size_t channels = forward.mean.size();
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
}

bool SyncBatchNorm::IsReady(Duration limit) const {
  return !waiting_ || Table::Get().IsReady(*waiting_, limit);
}

void SyncBatchNorm::Finish() {
  OnBackend([&] {
    finish_(waiting_ ? Table::Get().Await(*std::exchange(waiting_, std::nullopt)) : Numbers());
    backend_->Finish();
  });
  EndCall();
}

void SyncBatchNorm::EndCall() {
  waiting_.reset();
  finish_ = nullptr;
  copies_.clear();
}

void SyncBatchNorm::StartExchange(const Tensor& x, Numbers own) {
  const bool is_forward = phase_ == Phase::kForward;
  const Operation operation = is_forward ? Operation::kMoments : Operation::kSum;
  Contribution contribution;
  contribution.phase = phase_;
  contribution.members = &layer_->members;
  contribution.device = device_;
  contribution.shape = x.shape;
  contribution.signature = {operation, x.dtype,           x.shape[AxisOf(x)],
                            Axis(),    options_->epsilon, options_->ranks};
  contribution.numbers = std::move(own);
  contribution.devices = static_cast<size_t>(options_->num_devices);
  contribution.expected = &options_->contexts;
  contribution.shared_name = options_->shared_name;
  contribution.timeout_seconds = options_->timeout > 0 ? options_->timeout : default_timeout.load();
  waiting_ = Table::Get().Begin(std::move(contribution), &forward_->ticket);
}

void SyncBatchNorm::Fail(const std::string& text) {
  const bool ranks_wait = used_batch_ && options_->ranks.size() != 1;
  Table::Get().Fail(text, ranks_wait);
  throw Error(text);
}

void SyncBatchNorm::CheckFinite(const BatchMoments& moments, const Device* shard,
                                const ForwardTensors& tensors) {
  if (options_->nonfinite != NonFinite::kRaise) return;
  const auto channel =
      FirstNonFinite(moments, *options_, tensors.running_mean, tensors.running_var);
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

void SyncBatchNorm::KeepInputIfNeeded(const Layout& layout, const ForwardTensors& tensors) {
  if (!options_->from_output) return;
  ForwardState* const state = &*forward_;
  state->keeps_x =
      tensors.y_mode != WriteMode::kWrite ||  // y was not written, or was added to other values
      !CanReconstruct(state->spread, state->offset, state->count, options_->activation,
                      tensors.y.dtype);
  if (state->keeps_x) {  // x still exists, because MXNet gives y other memory
    const size_t bytes = static_cast<size_t>(layout.Size()) * SizeOf(tensors.x.dtype);
    state->kept_x = backend_->Keep(tensors.x.data, bytes);
    state->kept_block = layout.block;
  } else {
    backend_->Forget();
  }
}

Layout SyncBatchNorm::LayoutOf(const Tensor& tensor) const {
  const int axis = AxisOf(tensor), ndim = static_cast<int>(tensor.shape.size());
  Layout layout{1, tensor.shape[axis], 1, tensor.block};
  for (int i = 0; i < axis; ++i) layout.outer *= tensor.shape[i];
  for (int i = axis + 1; i < ndim; ++i) layout.inner *= tensor.shape[i];
  return layout;
}

Tensor SyncBatchNorm::InBlocks(const Layout& wanted, const Tensor& tensor) {
  if (tensor.block == wanted.block) return tensor;
  const auto copy = std::make_shared<std::vector<float>>(static_cast<size_t>(wanted.Size()));
  cpu::ChangeBlock(LayoutOf(tensor), static_cast<const float*>(tensor.data), wanted.block,
                   copy->data());
  copies_.push_back(copy);
  return {copy->data(), tensor.shape, tensor.dtype, wanted.block};
}

void SyncBatchNorm::CheckVectors(const Layout& layout,
                                 const std::vector<const Tensor*>& vectors) const {
  for (const Tensor* vector : vectors) {  // a graph may be bound to parameters of other shapes
    if (vector->shape == std::vector<int64_t>{layout.channels}) continue;
    throw DeviceError(Concat("parameters and other vectors must have the shape (", layout.channels,
                             "), got ", ShapeText(vector->shape)));
  }
}

// Runs a part of a call. An exception ends the call, and the waits of other devices and ranks.
// Table and Fail throw an Error after they have ended these waits.
template <typename Body>
void SyncBatchNorm::OnBackend(const Body& body) {
  const bool is_forward = phase_ == Phase::kForward;
  const auto abandon = [&] {
    backend_->Abandon();
    EndCall();
    if (is_forward) forward_.reset();
  };
  try {
    body();
  } catch (const Error&) {
    abandon();
    throw;
  } catch (const std::exception& error) {
    abandon();
    Fail(Concat("SyncBatchNorm '", name_, "', ", is_forward ? "forward" : "backward", " on ",
                device_.Name(), ": ", error.what()));
  }
}

}  // namespace syncbn
