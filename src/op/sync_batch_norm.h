// Forward and backward of the layer on one device. docs/design/data_path.md follows a call.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "exchange/table.h"
#include "exchange/wait.h"
#include "op/backend.h"
#include "op/layer.h"

namespace syncbn {

// The tensors of a forward call. Running statistics are updated in place.
struct ForwardTensors {
  Tensor x, gamma, beta;
  WriteMode y_mode;
  Tensor y, running_mean, running_var;
  // Only if masked: x is a matrix whose valid rows come first, and `rows` has the number of valid
  // rows, repeated for each channel. Calls do not read or write the other rows.
  Tensor rows = {};
};

struct Gradients {
  WriteMode dx_mode, dgamma_mode, dbeta_mode;
  Tensor dx, dgamma, dbeta;
};

class SyncBatchNorm {
 public:
  // `device` identifies the shard in exchanges and errors. `backend` runs the kernels. A forward
  // call and its backward calls use the options that the layer has when the forward call begins.
  SyncBatchNorm(std::shared_ptr<Layer> layer, bool masked, const Device& device,
                std::unique_ptr<Backend> backend);

  // The options of the latest forward call.
  const Options& options() const { return *options_; }

  // Returns true if a forward call uses the statistics of the batch, not the running ones.
  bool UsesBatch(bool training) const;

  // A call has two parts. The first part contributes to an exchange and does not wait, and Finish,
  // which another thread may call, waits and writes the results. A part that throws ends the call.

  // Forward computes y = f((x - mean) / sqrt(var + epsilon) * gamma + beta), where f is the
  // activation.
  void BeginForward(bool training, const ForwardTensors& tensors);
  // Backward computes the gradients of the latest forward call. `saved` is its y if
  // options().from_output is set, else its x. dgamma and dbeta are sums over this device's shard.
  void BeginBackward(const Tensor& dy, const Tensor& saved, const Gradients& out);
  // Returns true if Finish will not wait for other devices or ranks. It stays awake for at most
  // `limit` until that is so.
  bool IsReady(Duration limit) const;
  void Finish();

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
    int64_t kept_block = 1;  // see Layout
  };

  // Returns (count, mean[C], m2[C]) of this device's shard.
  Numbers ShardMoments(const Layout& layout, const ForwardTensors& tensors);
  void EndForward(const Layout& layout, const ForwardTensors& tensors, Numbers reduced);
  // Updates the running statistics or Layer::collected. Returns the variance.
  std::vector<double> BatchVariance(const BatchMoments& batch, const ForwardTensors& tensors);
  void SetScale(const std::vector<double>& var, const ForwardTensors& tensors);
  PassInput InputOf(const Layout& layout, const Tensor& tensor) const;
  // Raises an error on all devices if the options say so and moments are not finite. These are of
  // the shard of a device, or of the whole batch if `shard` is null.
  void CheckFinite(const BatchMoments& moments, const Device* shard, const ForwardTensors& tensors);
  int64_t ValidRows(const Layout& layout, const Tensor& rows) const;
  void KeepInputIfNeeded(const Layout& layout, const ForwardTensors& tensors);
  void WriteDx(const PassInput& input, const Numbers& sums, const Gradients& out);

  // The axis of the channels, which is negative from the end; of a tensor, from 0.
  int Axis() const { return masked_ ? -1 : options_->axis; }
  int AxisOf(const Tensor& tensor) const {
    return Axis() < 0 ? Axis() + static_cast<int>(tensor.shape.size()) : Axis();
  }
  Layout LayoutOf(const Tensor& tensor) const;
  // Returns the tensor, or a copy, with the blocks of the layout. The copy lasts until EndCall.
  Tensor InBlocks(const Layout& wanted, const Tensor& tensor);
  void CheckVectors(const Layout& layout, const std::vector<const Tensor*>& vectors) const;

  // Contributes moments in forward, and sums in backward. It is an error if the dtype or the number
  // of channels of `x` differs between devices.
  void StartExchange(const Tensor& x, Numbers own);
  // Ends all waits of other devices, and of ranks that may wait for this one, with this error.
  [[noreturn]] void Fail(const std::string& text);

  template <typename Body>
  void OnBackend(const Body& body);
  void EndCall();

  const std::shared_ptr<Layer> layer_;
  const bool masked_;  // see ForwardTensors
  const Device device_;
  std::shared_ptr<const Options> options_;
  const std::string& name_;  // the name of the layer
  const std::unique_ptr<Backend> backend_;
  bool used_batch_ = false;              // the latest forward call used the statistics of the batch
  std::optional<ForwardState> forward_;  // empty if the latest forward call failed

  // The call between its parts.
  Phase phase_ = Phase::kForward;
  std::optional<Waiting> waiting_;  // empty if the call needs no other device
  std::function<void(Numbers reduced)> finish_;
  std::vector<std::shared_ptr<void>> copies_;
};

}  // namespace syncbn
