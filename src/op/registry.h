// Finds a layer, which its devices in this process share, by its key. Keys are unique (a UUID), so
// two nets with equal prefixes share nothing.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "exchange/table.h"
#include "op/options.h"
#include "op/statistics.h"

namespace syncbn {

// The devices that normalize together.
class Layer {
 public:
  explicit Layer(const std::string& name) : members(name) {}

  std::shared_ptr<const Options> options() const { return std::atomic_load(&options_); }
  void SetOptions(Options options) {
    std::atomic_store(&options_, std::make_shared<const Options>(std::move(options)));
  }

  Members members;
  CollectedMoments collected;

 private:
  std::shared_ptr<const Options> options_ = std::make_shared<const Options>();
};

class Registry {
 public:
  static Registry& Get();

  // Creates the layer with this key. Python and operators keep it alive.
  std::shared_ptr<Layer> Create(const std::string& key, const std::string& name);
  // Throws Error if there is no such layer.
  std::shared_ptr<Layer> Find(const std::string& key) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::weak_ptr<Layer>> layers_;
};

}  // namespace syncbn
