// The numbers of a group's forward calls. They never restart: a number names one call for as long
// as the group lives.
// Group guards it with its mutex. It must not know of rendezvous.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>

#include "collective/devices/device.h"

namespace syncbn {

// The devices of a call; null for all of a group.
using Participants = std::shared_ptr<const std::set<Device>>;

struct CallNumbers {
  // Of each member's next call. A member is a device that has called since the latest restart.
  std::map<Device, int64_t> next;
  // Of the first call of a device that becomes a member.
  int64_t start = 0;
  // Of the oldest call that counts; earlier ones were made before a restart.
  int64_t oldest = 0;

  int64_t Take(const Device& device) { return next.emplace(device, start).first->second++; }
  bool IsVoid(int64_t number) const { return number < oldest; }

  std::set<Device> Members() const {
    std::set<Device> members;
    for (const auto& entry : next) members.insert(entry.first);
    return members;
  }

  // All devices continue with the same number.
  void Level() {
    for (const auto& entry : next) start = std::max(start, entry.second);
    for (auto& entry : next) entry.second = start;
  }

  // Makes all calls void, and removes the members.
  void Restart() {
    Level();
    next.clear();
    oldest = start;
  }
};

}  // namespace syncbn
