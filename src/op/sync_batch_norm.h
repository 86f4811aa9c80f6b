// Forward and backward of the layer on one device. It must not know a framework.
// docs/design/data_path.md follows a call from end to end.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/layout.h"
#include "exchange/table.h"
#include "op/backend.h"
#include "op/options.h"
#include "op/registry.h"
#include "op/running_statistics.h"
#include "op/tensor.h"

namespace syncbn {

// The tensors of a forward call. Running statistics are updated in place.
struct ForwardTensors {
  Tensor x, gamma, beta;
  WriteMode y_mode;
  Tensor y, running_mean, running_var;
  // If masked: the number of valid rows (of the axes before the channels), once for each channel.
  // Others are neither read nor written, in forward and backward.
  Tensor rows = {};
};

// Of each channel, in a shard or in the whole batch.
struct GradientSums {
  std::vector<double> dz, dz_xmu;
};

struct Gradients {
  WriteMode dx_mode, dgamma_mode, dbeta_mode;
  Tensor dx, dgamma, dbeta;
};

class SyncBatchNorm {
 public:
  // `device` is the rank in exchanges; `backend` is where it computes.
  SyncBatchNorm(const Options& options, const Device& device, std::shared_ptr<Layer> layer,
                std::unique_ptr<Backend> backend);

  // Changes the options of the next forward call, and of its backward calls.
  void SetOptions(const Options& options) { options_ = options; }

  // True if backward reads y instead of x.
  bool IsFromOutput() const { return options_.from_output; }

  // True if a forward call takes the statistics of the batch, not the running ones: in training, or
  // while moments are collected.
  bool TakesBatch(bool training) const;

  // y = f((x - mean) / sqrt(var + epsilon) * gamma + beta). Statistics of the batch update the
  // running ones, or are collected.
  void Forward(bool training, const ForwardTensors& tensors);

  // Gradients of the forward call before it. `saved` is its y if options say from_output, else its
  // x. dgamma and dbeta are those of this device's shard: the trainer sums them over devices.
  void Backward(const Tensor& dy, const Tensor& saved, const Gradients& out);

 private:
  // What a forward call leaves for its backward calls.
  struct ForBackward {
    Ticket ticket{};
    int64_t calls = 0;  // of backward
    int64_t rows = 0;   // that are valid; only if masked
    double count = 0;   // 0 also where the statistics did not depend on x
    std::vector<double> mean, inv_std;
    std::vector<double> scale, offset;  // z = (x - mean) * scale + offset
    std::vector<double> spread;         // the standard deviation of z
    bool keeps_x = false;               // a copy of x, because y is not enough
    const void* kept_x = nullptr;
  };

  void ForwardByBatch(const Layout& layout, const ForwardTensors& tensors, ForBackward* left);
  void ForwardByRunning(const Layout& layout, const ForwardTensors& tensors, ForBackward* left);
  void SetScale(const std::vector<double>& var, const ForwardTensors& tensors,
                ForBackward* left) const;
  void Normalize(const Layout& layout, const ForwardTensors& tensors, const ForBackward& by);
  void TakeStatistics(const Ticket& ticket, const BatchMoments& batch,
                      const ForwardTensors& tensors);
  // Ends with an error for all devices if moments are not finite.
  void CheckFinite(const BatchMoments& moments, const std::string& whose,
                   const std::string& beside, const ForwardTensors& tensors);
  int64_t ValidRows(const Layout& layout, const Tensor& rows) const;
  void KeepInputIfNeeded(const Layout& layout, const ForwardTensors& tensors, ForBackward* left);

  BatchMoments Merge(const Tensor& x, const BatchMoments& own, Ticket* ticket);
  GradientSums Add(const Tensor& saved, const GradientSums& own, Ticket* ticket, int64_t repeat);
  Numbers AllReduce(Phase phase, const Tensor& x, Operation operation, int64_t repeat,
                    Numbers own, Ticket* ticket);
  // Fails all who wait, now and later, with this text; other ranks, too, if they may wait.
  [[noreturn]] void Fail(const std::string& text);

  PassInput InputOf(const Layout& layout, const Tensor& dy, const Tensor& saved) const;
  void WriteParameterGradients(const GradientSums& sums, const Gradients& out);

  // Runs body(layout) between the backend's Begin and Finish.
  template <typename Body>
  void OnBackend(const char* phase, const Tensor& x, const std::vector<const Tensor*>& vectors,
                 const Body& body);

  Options options_;
  const Device device_;
  const std::shared_ptr<Layer> layer_;
  const std::string& name_;  // the layer's
  const std::unique_ptr<Backend> backend_;
  bool by_batch_ = false;     // of the latest forward call
  std::optional<ForBackward> forward_;  // none if it has failed
};

}  // namespace syncbn
