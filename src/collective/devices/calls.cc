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

// Those of a device that has never called are all zero.
CallLog::Calls CallLog::OfLocked(const Device& device) const {
  const auto entry = calls_.find(device);
  return entry == calls_.end() ? Calls() : entry->second;
}

bool CallLog::DrivesBoth(const Device& device, const std::set<Device>& others) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return OfLocked(device).driver > 1 &&
         std::any_of(others.begin(), others.end(),
                     [&](const Device& other) { return OfLocked(other).driver > 1; });
}

Absence CallLog::Describe(const AllReduceOptions& options, const Rendezvous& rendezvous,
                          const std::set<Device>& members) const {
  std::lock_guard<std::mutex> lock(mutex_);
  Absence absence{options, rendezvous, needs_driver_};
  for (const auto& arrival : rendezvous.arrivals) {
    const Device& device = arrival.first;
    const Calls calls = OfLocked(device);
    absence.driver = std::max(absence.driver, calls.driver);
    if (CountFunctions(device, 0) > 0) absence.in_driver.insert(device);
    if (calls.queued > 0) absence.again.insert(device);
  }
  const bool known = std::none_of(calls_.begin(), calls_.end(),
                                  [](const auto& entry) { return entry.second.repeats; });
  const bool are_all_expected = options.expected.size() == options.size;
  for (const Device& device : are_all_expected ? options.expected : members) {
    if (rendezvous.arrivals.count(device)) continue;
    const bool has_called = calls_.count(device) > 0;
    absence.missing.insert(device);
    if (!has_called) absence.never.insert(device);
    if (OfLocked(device).queued > 0) {
      absence.queued.insert(device);
    } else if (known || !has_called) {
      absence.idle.insert(device);
    }
  }
  return absence;
}

}  // namespace syncbn
