// The layers of the process.
#include "op/registry.h"

#include <iterator>

#include "core/error.h"

namespace syncbn {

Registry& Registry::Get() {
  static Registry* registry = new Registry;  // operators may outlive static destructors
  return *registry;
}

std::shared_ptr<Layer> Registry::FindOrCreate(const std::string& key, const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<Layer>& layer = layers_[key];
  if (layer) return layer;
  // A graph outlives the block that it was traced with. If that is collected between the calls for
  // two devices, they must meet nevertheless.
  layer = all_[key].lock();
  if (layer) return layer;
  for (auto other = all_.begin(); other != all_.end();) {
    other = other->second.expired() ? all_.erase(other) : std::next(other);
  }
  layer = std::make_shared<Layer>(name);
  all_[key] = layer;
  return layer;
}

std::shared_ptr<Layer> Registry::Find(const std::string& key) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = layers_.find(key);
  if (entry == layers_.end()) throw Error(Concat("no layer has the key \"", key, "\""));
  return entry->second;
}

void Registry::Keep(const std::string& key, const std::string& name, bool is_block) {
  const std::shared_ptr<Layer> layer = FindOrCreate(key, name);
  std::lock_guard<std::mutex> lock(mutex_);
  layers_[key] = layer;
  ++layer->owners;
  if (is_block) layer->has_block = true;
}

void Registry::Release(const std::string& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = layers_.find(key);
  if (entry == layers_.end()) return;
  Layer& layer = *entry->second;
  if (--layer.owners == 0 && layer.has_block) layers_.erase(entry);
}

}  // namespace syncbn
