#include "exchange/members.h"

#include <algorithm>

#include "core/error.h"
#include "exchange/report.h"

namespace syncbn {

std::set<Device> Members::Devices() const {
  std::set<Device> devices;
  for (const auto& entry : next_) devices.insert(entry.first);
  return devices;
}

// If one device too many calls, either the net has moved and the old devices no longer call, or
// more devices are in use than `size`. A former member must not rejoin, because its batch would be
// reduced with another batch of the new members.
Ticket Members::Enter(const Device& device, size_t size, bool is_busy, int64_t* next_number) {
  if (participants_ && !participants_->count(device)) {
    throw Error(NoParticipantReport(layer, device, *participants_));
  }
  if (!Has(device)) {
    const std::set<Device> others = Devices();
    const bool is_full = others.size() >= size;
    if (HasMoved(device) || (is_full && is_busy)) {
      throw Error(TooManyDevicesReport(layer, device, others, size));
    }
    if (is_full) {
      former_.insert(others.begin(), others.end());
      Clear();
    }
  }
  const int64_t call = next_.emplace(device, start_).first->second++;
  const auto [number, is_first] = numbers_.emplace(call, *next_number);
  *next_number += is_first;
  return {number->second, generation_, participants_};
}

void Members::SetParticipants(std::set<Device> participants) {
  Level();
  participants_ = participants.empty()
                      ? nullptr
                      : std::make_shared<const std::set<Device>>(std::move(participants));
}

void Members::Restart() {
  Clear();
  former_.clear();
}

void Members::Clear() {
  Level();
  next_.clear();
  ++generation_;
}

void Members::Level() {
  for (const auto& entry : next_) start_ = std::max(start_, entry.second);
  for (auto& entry : next_) entry.second = start_;
  numbers_.clear();
}

}  // namespace syncbn
