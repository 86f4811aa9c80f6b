// A layer: its options, the state that its devices share, and its statistics.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/device.h"
#include "exchange/table.h"
#include "kernels/passes.h"
#include "op/backend.h"

namespace syncbn {

// The effect of a batch whose mean or variance is not finite: it updates the running statistics,
// does not update them, or raises an error.
enum class NonFinite { kPropagate, kSkip, kRaise };

struct Options {
  int num_devices = 1;
  double epsilon = 1e-5;  // squared units of x
  double momentum = 0.9;  // weight of the old running value
  int axis = 1;           // axis of the channels; negative from the end
  bool fix_gamma = false;
  bool unbiased_running_var = false;
  NonFinite nonfinite = NonFinite::kPropagate;
  Activation activation;
  bool from_output = false;   // backward reads y instead of x
  bool masked = false;        // only the first rows of x are valid, see ForwardTensors
  double timeout = 0;         // seconds; 0 means default_timeout
  std::set<Device> contexts;  // contexts of the parameters, if known; only for texts of errors
  std::vector<int> ranks;     // synchronized ranks, ascending; empty for all ranks
  std::string shared_name;    // identifies the layer in messages between processes
};

// The moments of each channel of a shard or of the whole batch.
struct BatchMoments {
  Numbers numbers;  // as in exchanges: (count, mean[C], m2[C])

  double count() const { return numbers[0]; }  // elements per channel
  size_t channels() const { return numbers.size() / 2; }
  double mean(size_t c) const { return numbers[1 + c]; }
  double m2(size_t c) const { return numbers[1 + channels() + c]; }
};

// Returns the first channel whose mean or variance is not finite in the running statistics' dtype.
std::optional<size_t> FirstNonFinite(const BatchMoments& batch, const Options& options,
                                     const Tensor& running_mean, const Tensor& running_var);

// Sets running = momentum * running + (1 - momentum) * batch for the mean and the variance. An
// empty batch changes nothing. Prints a warning, once per process, if each channel has one value.
void UpdateRunning(const BatchMoments& batch, const Options& options, const std::string& layer,
                   Backend* backend, const Tensor& running_mean, const Tensor& running_var);

// The merged moments of batches that a layer receives while it collects. Meanwhile the layer uses
// the statistics of each batch, also in inference, and does not change its running statistics.
class CollectedMoments {
 public:
  void Start();
  void End() { is_active_ = false; }
  bool IsActive() const { return is_active_; }

  // Adds the batch of the forward call with number `call`. All devices add the same batch, and only
  // the first Add counts. Devices wait for each other, so `call` never decreases.
  void Add(int64_t call, const BatchMoments& batch);

  // Returns (count, mean[C], m2[C]); empty without a batch.
  Numbers Total() const;

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> is_active_{false};
  int64_t latest_call_ = -1;
  Numbers total_;
};

class Layer {
 public:
  explicit Layer(const std::string& name) : members(name) {}

  std::shared_ptr<const Options> options() const { return std::atomic_load(&options_); }
  void SetOptions(Options options) {
    std::atomic_store(&options_, std::make_shared<const Options>(std::move(options)));
  }

  Members members;  // the devices that call the layer
  CollectedMoments collected;

 private:
  std::shared_ptr<const Options> options_ = std::make_shared<const Options>();
};

// Creates a layer, which exists until its last pointer is deleted. The key must be unique.
std::shared_ptr<Layer> CreateLayer(const std::string& key, const std::string& name);
// Throws Error if there is no such layer.
std::shared_ptr<Layer> FindLayer(const std::string& key);

}  // namespace syncbn
