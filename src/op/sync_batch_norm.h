// Forward and backward of the layer on one device, out of kernels and the group's exchange.
// Who uses it: mxnet/custom_op.cc, one object per node of a graph and device. It knows no
// framework.
#pragma once
#include <initializer_list>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "collective/group.h"
#include "core/activation.h"
#include "core/layout.h"
#include "op/backend.h"
#include "op/kept_channels.h"
#include "op/tensor.h"

namespace syncbn {

struct Options {
  int num_devices = 1;
  double epsilon = 1e-5;   // in squared units of x
  double momentum = 0.9;   // fraction of the old running value that is kept
  bool cumulative = false;  // momentum=None: running values are the mean of all batches' values
  int axis = 1;
  bool fix_gamma = false;
  bool use_global_stats = false;
  bool unbiased_running_var = false;
  Activation activation;       // of the output
  bool from_output = false;    // whether backward reads y instead of x; not for an ELU
  double timeout = 0;  // seconds; 0 means DefaultTimeout()
  std::set<Device> contexts;  // where the layer is initialized, if known; for messages
  bool across_processes = true;  // false: the devices of this process only
  std::vector<int> ranks;        // that synchronize, ascending; empty for all
  std::string shared_name;       // of the layer, equal in all processes and unique in each
};

struct Gradients {
  Request dx_request, dgamma_request, dbeta_request;
  Tensor dx, dgamma, dbeta;
};

class SyncBatchNorm {
 public:
  // `device` is the rank in exchanges; `backend` is where it computes.
  SyncBatchNorm(const Options& options, const Device& device, std::shared_ptr<Group> group,
                std::unique_ptr<Backend> backend);

  // y = f((x - mean) / sqrt(var + epsilon) * gamma + beta). `training` takes the batch's statistics
  // and updates the running ones in place, unless use_global_stats.
  void Forward(bool training, const Tensor& x, const Tensor& gamma, const Tensor& beta,
               Request y_request, const Tensor& y, const Tensor& running_mean,
               const Tensor& running_var);

  // Gradients of the forward call before it. `t` is its y if options say from_output, else its x.
  // dgamma and dbeta are those of this device's shard: the trainer sums them over devices.
  void Backward(const Tensor& dy, const Tensor& t, const Gradients& out);

 private:
  // Runs body(layout) between the backend's Begin and Finish.
  template <typename Body>
  void OnBackend(const char* operation, const Tensor& x,
                 std::initializer_list<const Tensor*> vectors, const Body& body);
  void ComputeForward(const Layout& layout, const Tensor& x, const Tensor& gamma,
                      const Tensor& beta, Request y_request, const Tensor& y,
                      const Tensor& running_mean, const Tensor& running_var);
  void ComputeBackward(const Layout& layout, const Tensor& dy, const Tensor& t,
                       const Gradients& out);
  std::vector<int64_t> NotReconstructible(const std::vector<double>& gamma, Request y_request,
                                          const Tensor& y) const;
  void WriteParameterGradients(const Payload& sums, const Gradients& out);
  void ExchangeMoments(const Tensor& x, const Layout& layout, double* m2);
  void UpdateRunning(const std::vector<double>& batch_var, const Tensor& running_mean,
                     const Tensor& running_var) const;
  bool MeetsOthers() const;
  std::shared_ptr<const Payload> Exchange(const char* operation, const Tensor& x,
                                          const Layout& layout, Payload payload, Reducer reducer,
                                          const char* merger);
  ProcessGroup* Processes() const;
  Layout LayoutOf(const Tensor& x) const;
  std::vector<double> GammaOf(const Tensor& gamma) const;

  const Options options_;
  const Device device_;
  const std::shared_ptr<Group> group_;
  const std::unique_ptr<Backend> backend_;

  // What backward needs of the forward call before it.
  bool batch_statistics_ = false;
  Ticket ticket_;
  int64_t backward_calls_ = 0;
  double count_ = 0;
  std::vector<double> mean_, inv_std_;
  std::vector<double> scale_, offset_;  // from x - mean to z
  KeptChannels kept_;                   // if from_output
};

}  // namespace syncbn
