// Finds by a layer's key what its devices in this process share. Keys are unique for each block (a
// UUID), so two nets with equal prefixes share nothing.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "exchange/table.h"
#include "op/collected_moments.h"

namespace syncbn {

// Devices that normalize together.
struct Layer {
  explicit Layer(const std::string& name) : members(name) {}

  Members members;
  CollectedMoments collected;
  std::atomic<bool> has_block{false};  // false for a node of a symbol from a file
  int owners = 0;  // in Python; under the registry's mutex
};

class Registry {
 public:
  static Registry& Get();

  // The layer with this key; created at the first call.
  std::shared_ptr<Layer> FindOrCreate(const std::string& key, const std::string& name);
  // Throws Error if there is none.
  std::shared_ptr<Layer> Find(const std::string& key) const;
  // The same for an owner: its block, or who looks at the node of a graph that has outlived it.
  void Keep(const std::string& key, const std::string& name, bool is_block);
  // Operators keep a layer alive that all owners have released, and others of its key find it.
  void Release(const std::string& key);

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Layer>> layers_;
  std::map<std::string, std::weak_ptr<Layer>> all_;  // the released ones, too
};

}  // namespace syncbn
