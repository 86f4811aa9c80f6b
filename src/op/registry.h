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

#include "exchange/table.h"
#include "op/collected_moments.h"
#include "op/options.h"

namespace syncbn {

// Devices that normalize together.
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

  // Makes the layer with this key. Python and operators keep it alive.
  std::shared_ptr<Layer> Create(const std::string& key, const std::string& name);
  // Throws Error if there is none.
  std::shared_ptr<Layer> Find(const std::string& key) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::weak_ptr<Layer>> layers_;
};

}  // namespace syncbn
