// See call_numbers.h.
#include "collective/devices/call_numbers.h"

#include <algorithm>

namespace syncbn {

std::set<Device> CallNumbers::Members() const {
  std::set<Device> members;
  for (const auto& entry : next) members.insert(entry.first);
  return members;
}

void CallNumbers::Level() {
  for (const auto& entry : next) start = std::max(start, entry.second);
  for (auto& entry : next) entry.second = start;
}

void CallNumbers::Restart(const Participants& participants, size_t size) {
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

int64_t CallNumbers::Shared(int64_t number, bool is_forward, const Generation& generation) {
  if (is_forward && !(generation == shared_generation)) {
    shared_generation = generation;
    shared_offset = number;
  }
  return number - shared_offset;
}

}  // namespace syncbn
