// The first layer that trained on one value per channel over all devices: its output is beta.
// Who uses it: SyncBatchNorm notes it; Python warns of it after a step.
#pragma once
#include <mutex>
#include <string>

namespace syncbn {

class SingleValue {
 public:
  static SingleValue& Get() {
    static auto* const single_value = new SingleValue;  // operators outlive static destructors
    return *single_value;
  }

  void Note(const std::string& layer) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_noted_) layer_ = layer;
    is_noted_ = true;
  }

  // The layer's name, once; empty otherwise.
  std::string Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::string layer;
    layer.swap(layer_);
    return layer;
  }

 private:
  std::mutex mutex_;
  bool is_noted_ = false;
  std::string layer_;
};

}  // namespace syncbn
