// Finds by a layer's key what its devices in this process share. Keys are unique for each layer (a
// UUID), so two nets with equal prefixes share nothing.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "collective/devices/group.h"
#include "op/collected_moments.h"
#include "op/options.h"

namespace syncbn {

// Devices that normalize together.
class Layer {
 public:
  explicit Layer(const std::string& name) : group(name) {}

  std::shared_ptr<const Options> options() const { return std::atomic_load(&options_); }
  void SetOptions(Options options) {
    std::atomic_store(&options_, std::make_shared<const Options>(std::move(options)));
  }

  Group group;
  CollectedMoments collected;

 private:
  std::shared_ptr<const Options> options_ = std::make_shared<const Options>();
};

class Registry {
 public:
  static Registry& Get();

  // Makes the layer with this key. Python and operators keep it alive.
  std::shared_ptr<Layer> Create(const std::string& key, const std::string& name);
  // Throws Error if there is none.
  std::shared_ptr<Layer> Find(const std::string& key) const;

  // The failure of the first failed layer, or an empty text.
  std::string FirstFailure() const;
  double LongestWait() const;  // of all groups
  // After one failure devices have called other layers unequally often, so all are reset.
  void ResetAll();
  void FailAll(const std::string& text);

 private:
  // Layers with work in flight are among them, even if Python has released them.
  std::vector<std::shared_ptr<Layer>> Layers() const;

  mutable std::mutex mutex_;
  std::map<std::string, std::weak_ptr<Layer>> layers_;
};

// The timeout in seconds of layers that have none. Longer than the slowest healthy first step that
// was seen (autotuning, cold caches, a busy machine), and short enough to wait for the message.
inline std::atomic<double> default_timeout{300.0};

}  // namespace syncbn
