// Counts of queued calls, and the threads that drive devices.
#include "collective/devices/calls.h"

#include <algorithm>

namespace syncbn {
namespace {

thread_local int devices_of_driver = 0;

// Drivers' functions that have not ended, by device. Operators may outlive static destructors.
std::mutex functions_mutex;
auto& functions = *new std::map<Device, int>;

// Returns the number of a device after this change.
int CountFunctions(const Device& device, int change) {
  std::lock_guard<std::mutex> lock(functions_mutex);
  return functions[device] += change;
}

}  // namespace

void EnterDriver(const Device& device, int devices) {
  devices_of_driver = devices;
  CountFunctions(device, 1);
}

void LeaveDriver(const Device& device) {
  devices_of_driver = 0;
  CountFunctions(device, -1);
}

CallLog::Epoch CallLog::NoteQueued(const Device& device) {
  std::lock_guard<std::mutex> lock(mutex_);
  Calls& calls = calls_[device];
  ++calls.queued;
  calls.driver = devices_of_driver;
  return epoch_;
}

void CallLog::NoteBegun(const Device& device, Epoch epoch, bool is_first) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (epoch != epoch_) return;
  Calls& calls = calls_[device];
  calls.repeats = !is_first;
  if (is_first) calls.queued = std::max(0, calls.queued - 1);
}

void CallLog::ExpectDriver() {
  std::lock_guard<std::mutex> lock(mutex_);
  needs_driver_ = true;
}

void CallLog::Clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++epoch_;
  for (auto& entry : calls_) entry.second.queued = 0;
}

bool CallLog::IsOneOfSeveralLocked(const Device& device) const {
  const auto entry = calls_.find(device);
  return entry != calls_.end() && entry->second.driver > 1;
}

bool CallLog::DrivesBoth(const Device& device, const std::set<Device>& others) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return IsOneOfSeveralLocked(device) &&
         std::any_of(others.begin(), others.end(),
                     [&](const Device& other) { return IsOneOfSeveralLocked(other); });
}

Absence CallLog::Describe(const AllReduceOptions& options, const Rendezvous& rendezvous,
                          const std::set<Device>& members) const {
  std::lock_guard<std::mutex> lock(mutex_);
  Absence absence;
  absence.is_forward = options.phase == "forward";
  absence.needs_driver = needs_driver_;
  absence.size = options.size;
  absence.on = options.expected;
  for (const auto& arrival : rendezvous.arrivals) {
    const Device& device = arrival.first;
    absence.arrived.insert(device);
    if (CountFunctions(device, 0) > 0) absence.in_driver.insert(device);
    const auto entry = calls_.find(device);
    if (entry == calls_.end()) continue;
    absence.driver = std::max(absence.driver, entry->second.driver);
    if (entry->second.queued > 0) absence.again.insert(device);
  }
  const bool known = std::none_of(calls_.begin(), calls_.end(),
                                  [](const auto& entry) { return entry.second.repeats; });
  for (const Device& device : options.expected.size() == options.size ? options.expected
                                                                      : members) {
    if (absence.arrived.count(device)) continue;
    absence.missing.insert(device);
    const auto entry = calls_.find(device);
    if (entry == calls_.end()) absence.never.insert(device);
    if (entry != calls_.end() && entry->second.queued > 0) {
      absence.queued.insert(device);
    } else if (known || entry == calls_.end()) {
      absence.idle.insert(device);
    }
  }
  absence.unknown = options.size - absence.arrived.size() - absence.missing.size();
  return absence;
}

}  // namespace syncbn
