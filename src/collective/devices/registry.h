// Finds the group of a layer by the layer's key.
// Who uses it: mxnet/, when an operator is made and when Python asks. Keys are unique for each
// block (a UUID), so two nets with equal prefixes never share a group.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collective/devices/group.h"

namespace syncbn {

class Registry {
 public:
  static Registry& Get();

  // The group with this key; created at the first call.
  std::shared_ptr<Group> FindOrCreate(const std::string& key, const std::string& layer);
  std::shared_ptr<Group> Find(const std::string& key) const;  // may be null
  // Releases the layer's group, and those of its groups of devices. Operators in flight keep a
  // released group alive.
  void Release(const std::string& key);

  // The failure of the first failed group, or an empty text.
  std::string FirstFailure() const;
  // After one failure devices have called other layers unequally often, so all groups are reset.
  void ResetAll();
  // Fails every group that is alive, those of released layers with work in flight included.
  void FailAll(const std::string& text);

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Group>> groups_;
  std::vector<std::weak_ptr<Group>> all_;  // the released ones, too
};

// Erases what a map has under the key of a layer, and of its groups of devices ("key/0").
template <typename Map>
void EraseLayer(const std::string& key, Map* map) {
  map->erase(key);
  map->erase(map->lower_bound(key + '/'), map->lower_bound(key + char('/' + 1)));
}

// The timeout in seconds of layers that have none. Longer than the slowest healthy first step that
// was seen (autotuning, cold caches, a busy machine), and short enough to wait for the message.
inline std::atomic<double> default_timeout{300.0};

}  // namespace syncbn
