#include "op/registry.h"

#include <iterator>

#include "core/error.h"

namespace syncbn {

Registry& Registry::Get() {
  static Registry* registry = new Registry;  // operators may outlive static destructors
  return *registry;
}

std::shared_ptr<Layer> Registry::Create(const std::string& key, const std::string& name) {
  const auto layer = std::make_shared<Layer>(name);
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto other = layers_.begin(); other != layers_.end();) {
    other = other->second.expired() ? layers_.erase(other) : std::next(other);
  }
  layers_[key] = layer;
  return layer;
}

std::shared_ptr<Layer> Registry::Find(const std::string& key) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = layers_.find(key);
  const auto layer = entry == layers_.end() ? nullptr : entry->second.lock();
  if (layer) return layer;
  throw Error(
      "a graph must have layers of this process, got a SyncBatchNorm layer that is not in this "
      "process. Call gluon_syncbn.revert_sync_batchnorm(net) before you export a net.");
}

}  // namespace syncbn
