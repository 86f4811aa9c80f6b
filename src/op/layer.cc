#include "op/layer.h"

#include <iterator>
#include <map>
#include <utility>

#include "core/error.h"

namespace syncbn {
namespace {

std::mutex layers_mutex;
// This map is never destroyed, because operators may outlive static objects.
auto& layers = *new std::map<std::string, std::weak_ptr<Layer>>;

}  // namespace

void Layer::SetOptions(Options options) {
  std::lock_guard<std::mutex> lock(mutex_);
  given_ = std::move(options);
  Update();
}

void Layer::SetParticipants(std::set<Device> participants) {
  std::lock_guard<std::mutex> lock(mutex_);
  participants_ = std::move(participants);
  Update();
}

void Layer::Update() {
  auto options = std::make_shared<Options>(given_);
  if (!participants_.empty()) {
    options->num_devices = static_cast<int>(participants_.size());
    options->contexts = participants_;
  }
  std::atomic_store(&options_, std::shared_ptr<const Options>(std::move(options)));
}

std::shared_ptr<Layer> CreateLayer(const std::string& key, const std::string& name) {
  const auto layer = std::make_shared<Layer>(name);
  std::lock_guard<std::mutex> lock(layers_mutex);
  for (auto other = layers.begin(); other != layers.end();) {
    other = other->second.expired() ? layers.erase(other) : std::next(other);
  }
  layers[key] = layer;
  return layer;
}

std::shared_ptr<Layer> FindLayer(const std::string& key) {
  std::lock_guard<std::mutex> lock(layers_mutex);
  const auto entry = layers.find(key);
  const auto layer = entry == layers.end() ? nullptr : entry->second.lock();
  if (layer) return layer;
  throw Error(
      "a graph must run in the process that created its layers, got a SyncBatchNorm layer that is "
      "not in this process. Call gluon_syncbn.revert_sync_batchnorm(net) before you export a net.");
}

}  // namespace syncbn
