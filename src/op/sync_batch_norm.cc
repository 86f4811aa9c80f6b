// A call of the layer from its backend's Begin to Finish, and its exchanges with other devices;
// forward.cc and backward.cc compute in between. Per-channel numbers are double throughout.
#include "op/sync_batch_norm.h"

#include <cstddef>
#include <utility>

#include "core/error.h"

namespace syncbn {

SyncBatchNorm::SyncBatchNorm(const Options& options, const Device& device,
                             std::shared_ptr<Layer> layer, std::unique_ptr<Backend> backend)
    : options_(options),
      device_(device),
      layer_(std::move(layer)),
      group_(&layer_->group),
      backend_(std::move(backend)) {}

// A device whose runtime fails never arrives at a rendezvous, so the others are told at once. So
// are other processes, which may wait for an exchange that this process has not begun.
template <typename Body>
void SyncBatchNorm::OnBackend(const char* operation, const Tensor& x,
                              const std::vector<const Tensor*>& vectors, const Body& body) {
  const int ndim = static_cast<int>(x.shape.size());
  const int axis = options_.axis < 0 ? options_.axis + ndim : options_.axis;
  const Layout layout = MakeLayout(x.shape.data(), ndim, axis);
  try {
    pass_.emplace("local pass", operation, group_->layer(), device_);
    backend_->Begin(layout, vectors);
    body(layout);
    backend_->Finish();
    pass_.reset();
  } catch (const DeviceError& error) {
    Abandon();
    FailEverywhere(Concat("SyncBatchNorm '", group_->layer(), "', ", operation, " on ",
                          device_.Name(), ": ", error.what()));
  } catch (...) {
    Abandon();
    throw;
  }
}

void SyncBatchNorm::Abandon() noexcept {
  backend_->Abandon();
  pass_.reset();
}

void SyncBatchNorm::FailEverywhere(const std::string& text) {
  group_->Fail(text);
  Communicator* const processes = batch_statistics_ ? Processes() : nullptr;
  if (processes != nullptr) processes->Fail(text);
  throw Error(text);
}

void SyncBatchNorm::Forward(bool training, const ForwardTensors& of) {
  batch_statistics_ = TakesBatch(training);
  forward_succeeded_ = false;
  std::vector<const Tensor*> vectors{&of.gamma, &of.beta, &of.running_mean, &of.running_var};
  if (options_.masked) vectors.push_back(&of.rows);
  OnBackend("forward", of.x, vectors, [&](Layout layout) {
    if (options_.masked) layout.outer = rows_ = ValidRows(layout, of);
    if (batch_statistics_) {
      NormalizeByBatch(layout, of);
    } else {
      NormalizeByRunning(layout, of);
    }
    KeepInputIfNeeded(layout, of);
  });
  forward_succeeded_ = true;
}

void SyncBatchNorm::Backward(const Tensor& dy, const Tensor& t, const Gradients& out) {
  OnBackend("backward", t, {}, [&](Layout layout) {
    if (options_.masked) layout.outer = rows_;
    ComputeBackward(layout, dy, t, out);
  });
}

// Without payload and operation.
AllReduceOptions SyncBatchNorm::OptionsFor(const char* phase, const Tensor& x,
                                           const Layout& layout) const {
  AllReduceOptions options;
  options.ticket = ticket_;
  options.phase = phase;
  options.device = device_;
  options.size = static_cast<size_t>(options_.num_devices);
  options.expected = options_.contexts;
  options.processes = Processes();
  options.shared_name = options_.shared_name;
  Contribution& own = options.contribution;
  own.timeout_seconds = options_.timeout > 0 ? options_.timeout : default_timeout.load();
  own.ranks = options_.ranks;
  own.signature = Concat("channels=", layout.channels, ", dtype=", Name(x.dtype),
                         ", axis=", options_.axis, ", epsilon=", options_.epsilon);
  if (options_.nonfinite == NonFinite::kRaise) own.signature += ", nonfinite=raise";
  options.arrival.signature = Concat(own.signature, ", num_devices=", options_.num_devices);
  options.arrival.shape = ShapeText(x.shape);
  return options;
}

void SyncBatchNorm::Exchange(const char* phase, const Tensor& x, const Layout& layout,
                             ReduceOperation operation,
                             std::initializer_list<std::vector<double>*> payload) {
  AllReduceOptions options = OptionsFor(phase, x, layout);
  options.contribution.operation = operation;
  if (options.phase == "backward") options.repeat = backward_calls_++;
  for (const std::vector<double>* part : payload) {
    AppendBytes(part->data(), part->size(), &options.arrival.payload);
  }
  pass_.reset();
  const std::shared_ptr<const Reduced> reduced = group_->AllReduce(std::move(options));
  pass_.emplace("second pass", phase, group_->layer(), device_);
  ticket_.key = reduced->key;
  const std::vector<double> result = FromBytes<double>(reduced->payload);
  auto from = result.begin();
  for (std::vector<double>* part : payload) {
    const auto end = from + static_cast<std::ptrdiff_t>(part->size());
    part->assign(from, end);
    from = end;
  }
}

bool SyncBatchNorm::TakesBatch(bool training) const {
  return (training || layer_->collected.IsActive()) && !options_.use_global_stats;
}

// True if the statistics depend on more than this device.
bool SyncBatchNorm::Synchronizes() const {
  return batch_statistics_ && (options_.num_devices > 1 || Processes() != nullptr);
}

// The processes to synchronize with; null for none.
Communicator* SyncBatchNorm::Processes() const {
  if (!options_.across_processes || options_.ranks.size() == 1) return nullptr;
  Communicator* processes = TheCommunicator();
  if (processes == nullptr && !options_.ranks.empty()) {
    throw Error(Concat("SyncBatchNorm '", group_->layer(), "': its group has ",
                       options_.ranks.size(), " ranks, but gluon_syncbn.distributed.init() was not "
                       "called in this process"));
  }
  return processes != nullptr && processes->size() > 1 ? processes : nullptr;
}

}  // namespace syncbn
