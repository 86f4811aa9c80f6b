// The numbers of a group's forward calls. They never restart: a number names one call for as long
// as the group lives.
// Who uses it: Group, which guards it with its mutex. It must not know of rendezvous.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>

#include "collective/devices/device.h"
#include "collective/processes/message.h"

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
  // A call's number less the one by which all ranks know it.
  int64_t shared_offset = 0;
  // The generation of the processes in which shared_offset holds.
  Generation shared_generation{-1, 0};

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

  // Makes all calls void, and removes the members. Ranks go on counting after the last call that
  // all `size` devices, or all participants, have begun: no later call was reduced.
  void Restart(const Participants& participants, size_t size) {
    std::set<int64_t> of_participants;
    size_t present = 0;
    for (const auto& entry : next) {
      if (participants && !participants->count(entry.first)) continue;
      of_participants.insert(entry.second);
      ++present;
    }
    const bool complete = present > 0 && present >= (participants ? participants->size() : size);
    const int64_t finished = complete ? *of_participants.begin() : start;
    Level();
    next.clear();
    oldest = start;
    shared_offset += start - finished;
  }

  // The number by which all ranks know a call; the first forward call in a generation has 0.
  int64_t Shared(int64_t number, bool is_forward, const Generation& generation) {
    if (is_forward && !(generation == shared_generation)) {
      shared_generation = generation;
      shared_offset = number;
    }
    return number - shared_offset;
  }
};

}  // namespace syncbn
