// The groups of the process.
#include "collective/devices/registry.h"

#include <algorithm>

namespace syncbn {

Registry& Registry::Get() {
  static Registry* registry = new Registry;  // operators may outlive static destructors
  return *registry;
}

std::shared_ptr<Group> Registry::FindOrCreate(const std::string& key, const std::string& layer) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<Group>& group = groups_[key];
  if (group) return group;
  group = std::make_shared<Group>(layer);
  all_.erase(std::remove_if(all_.begin(), all_.end(),
                            [](const std::weak_ptr<Group>& other) { return other.expired(); }),
             all_.end());
  all_.push_back(group);
  return group;
}

std::shared_ptr<Group> Registry::Find(const std::string& key) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto entry = groups_.find(key);
  return entry == groups_.end() ? nullptr : entry->second;
}

void Registry::Release(const std::string& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  EraseLayer(key, &groups_);
}

std::string Registry::FirstFailure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& entry : groups_) {
    const std::string failure = entry.second->Failure();
    if (!failure.empty()) return failure;
  }
  return "";
}

void Registry::ResetAll() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& entry : groups_) entry.second->Reset();
}

void Registry::FailAll(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const std::weak_ptr<Group>& entry : all_) {
    if (const auto group = entry.lock()) group->Fail(text);
  }
}

}  // namespace syncbn
