// Forward and backward of the layer on one device. docs/design/data_path.md follows a call.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "exchange/table.h"
#include "op/backend.h"
#include "op/layer.h"

namespace syncbn {

// The tensors of a forward call. Running statistics are updated in place.
struct ForwardTensors {
  Tensor x, gamma, beta;
  WriteMode y_mode;
  Tensor y, running_mean, running_var;
  // Only if masked: x is a matrix whose valid rows come first, and `rows` has the number of valid
  // rows, repeated for each channel. Forward and Backward do not read or write the other rows.
  Tensor rows = {};
};

struct Gradients {
  WriteMode dx_mode, dgamma_mode, dbeta_mode;
  Tensor dx, dgamma, dbeta;
};

class SyncBatchNorm {
 public:
  // `device` identifies the shard in exchanges and errors. `backend` runs the kernels.
  SyncBatchNorm(const Options& options, const Device& device, std::shared_ptr<Layer> layer,
                std::unique_ptr<Backend> backend);

  // Sets the options of the next forward call and its backward calls.
  void SetOptions(const Options& options) { options_ = options; }

  bool SavesOutput() const { return options_.from_output; }  // true: MXNet saves y, not x

  // Returns true if a forward call uses the statistics of the batch, not the running ones.
  bool UsesBatch(bool training) const;

  // Computes y = f((x - mean) / sqrt(var + epsilon) * gamma + beta), where f is the activation.
  void Forward(bool training, const ForwardTensors& tensors);

  // Computes the gradients of the latest forward call. `saved` is its y if SavesOutput(), else
  // its x. dgamma and dbeta are sums over this device's shard.
  void Backward(const Tensor& dy, const Tensor& saved, const Gradients& out);

 private:
  // The results of a forward call that its backward calls read.
  struct ForwardState {
    Ticket ticket{};
    int64_t valid_rows = 0;  // only if masked
    double count = 0;        // elements per channel; 0 if the statistics do not depend on x
    std::vector<double> mean, inv_std;
    std::vector<double> scale, offset;  // z = (x - mean) * scale + offset
    std::vector<double> spread;         // the standard deviation of z
    bool keeps_x = false;               // kept_x is a copy of x, because y does not suffice
    const void* kept_x = nullptr;
  };

  // Reduces the moments of the batch, and updates the running statistics or Layer::collected.
  // Returns the variance, and sets the state's mean, count and ticket.
  std::vector<double> ReduceBatch(const Layout& layout, const ForwardTensors& tensors,
                                  ForwardState* state);
  void SetScale(const std::vector<double>& var, const ForwardTensors& tensors,
                ForwardState* state) const;
  PassInput InputOf(const Layout& layout, const Tensor& tensor, const ForwardState& state) const;
  // Raises an error on all devices if the options say so and moments are not finite. These are of
  // the shard of a device, or of the whole batch if `shard` is null.
  void CheckFinite(const BatchMoments& moments, const Device* shard, const ForwardTensors& tensors);
  int64_t ValidRows(const Layout& layout, const Tensor& rows) const;
  void KeepInputIfNeeded(const Layout& layout, const ForwardTensors& tensors, ForwardState* state);

  // Reduces moments in forward, and adds sums in backward. It is an error if the dtype or
  // the number of channels of `x` differs between devices.
  Numbers AllReduce(Phase phase, const Tensor& x, Numbers own, Ticket* ticket);
  // Ends all waits of other devices, and of ranks that may wait for this one, with this error.
  [[noreturn]] void Fail(const std::string& text);

  // Calls body(layout) between the backend's Begin and Finish.
  template <typename Body>
  void OnBackend(const char* phase, const Tensor& x, const std::vector<const Tensor*>& vectors,
                 const Body& body);

  Options options_;
  const Device device_;
  const std::shared_ptr<Layer> layer_;
  const std::string& name_;  // the name of the layer
  const std::unique_ptr<Backend> backend_;
  bool used_batch_ = false;              // the latest forward call used the statistics of the batch
  std::optional<ForwardState> forward_;  // empty if the latest forward call failed
};

}  // namespace syncbn
