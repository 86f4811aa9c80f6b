// Forward and backward of the layer on one device, out of kernels and the group's exchange. It must
// not know a framework. docs/design/data_path.md follows a call from end to end.
#pragma once
#include <initializer_list>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "collective/devices/span.h"
#include "core/layout.h"
#include "op/backend.h"
#include "op/registry.h"
#include "op/tensor.h"

namespace syncbn {

// A batch with a mean or variance that is not finite: does it update the running statistics, not
// update them, or end with an error?
enum class NonFinite { kPropagate, kSkip, kRaise };

struct Options {
  int num_devices = 1;
  double epsilon = 1e-5;  // in squared units of x
  double momentum = 0.9;  // fraction of the old running value that is kept
  int axis = 1;           // one of x's; negative from the end
  bool fix_gamma = false;
  bool use_global_stats = false;
  bool unbiased_running_var = false;
  NonFinite nonfinite = NonFinite::kPropagate;
  Activation activation;     // of the output
  bool from_output = false;  // backward reads y instead of x
  bool masked = false;       // only the first rows of x are valid, see ForwardTensors
  double timeout = 0;  // seconds; 0 means default_timeout
  std::set<Device> contexts;  // of the layer's parameters, if known; for messages
  bool across_processes = true;  // false: the devices of this process only
  std::vector<int> ranks;        // that synchronize, ascending; empty for all
  std::string shared_name;       // of the layer, equal in all processes and unique in each
};

// The tensors of a forward call. Running statistics are updated in place.
struct ForwardTensors {
  Tensor x, gamma, beta;
  Request y_request;
  Tensor y, running_mean, running_var;
  // If masked: the number of valid rows (of the axes before the channels), once for each channel.
  // Others are neither read nor written, in forward and backward.
  Tensor rows = {};
};

struct Gradients {
  Request dx_request, dgamma_request, dbeta_request;
  Tensor dx, dgamma, dbeta;
};

class SyncBatchNorm {
 public:
  // `device` is the rank in exchanges; `backend` is where it computes.
  SyncBatchNorm(const Options& options, const Device& device, std::shared_ptr<Layer> layer,
                std::unique_ptr<Backend> backend);

  // True if a forward call takes the statistics of the batch, not the running ones: in training, or
  // while moments are collected, unless use_global_stats.
  bool TakesBatch(bool training) const;

  // y = f((x - mean) / sqrt(var + epsilon) * gamma + beta). Statistics of the batch update the
  // running ones, or are collected.
  void Forward(bool training, const ForwardTensors& of);

  // Gradients of the forward call before it. `t` is its y if options say from_output, else its x.
  // dgamma and dbeta are those of this device's shard: the trainer sums them over devices.
  void Backward(const Tensor& dy, const Tensor& t, const Gradients& out);

 private:
  // Runs body(layout) between the backend's Begin and Finish.
  template <typename Body>
  void OnBackend(const char* operation, const Tensor& x,
                 const std::vector<const Tensor*>& vectors, const Body& body);
  void Abandon() noexcept;

  int64_t ValidRows(const Layout& layout, const ForwardTensors& of) const;
  void NormalizeByBatch(const Layout& layout, const ForwardTensors& of);
  void NormalizeByRunning(const Layout& layout, const ForwardTensors& of);
  void SetScale(const std::vector<double>& var, const ForwardTensors& of);
  void Normalize(const Layout& layout, const ForwardTensors& of);
  [[noreturn]] void RaiseNonFinite(const std::string& own, const Tensor& x, const Layout& layout);
  void UpdateRunning(const std::vector<double>& batch_var, const ForwardTensors& of) const;
  void KeepInputIfNeeded(const Layout& layout, const ForwardTensors& of);

  void ComputeBackward(const Layout& layout, const Tensor& dy, const Tensor& t,
                       const Gradients& out);
  BackwardInput InputOf(const Layout& layout, const Tensor& dy, const Tensor& t) const;
  void WriteParameterGradients(const std::vector<double>& sums, const Gradients& out);

  bool Synchronizes() const;
  [[noreturn]] void FailEverywhere(const std::string& text);
  AllReduceOptions OptionsFor(const char* phase, const Tensor& x, const Layout& layout) const;
  // Reduces this device's payload, which is several vectors, with the others', in place.
  void Exchange(const char* phase, const Tensor& x, const Layout& layout,
                ReduceOperation operation, std::initializer_list<std::vector<double>*> payload);
  Communicator* Processes() const;

  const Options options_;
  const Device device_;
  const std::shared_ptr<Layer> layer_;
  Group* const group_;
  const std::unique_ptr<Backend> backend_;
  std::optional<Span> pass_;  // of the call under way: before its exchange, or after it

  // Kept for backward by the forward call before it.
  bool forward_succeeded_ = false;
  bool batch_statistics_ = false;
  Ticket ticket_;
  int64_t backward_calls_ = 0;
  int64_t rows_ = 0;  // that are valid; only if masked
  double count_ = 0;
  std::vector<double> gamma_, mean_, inv_std_;
  std::vector<double> scale_, offset_;  // z = (x - mean) * scale + offset
  bool keeps_x_ = false;  // a copy of x, because y is not enough
  const void* kept_x_ = nullptr;
};

}  // namespace syncbn
