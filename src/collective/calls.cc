// Counts of queued calls, and the threads that drive devices.
#include "collective/calls.h"

#include <algorithm>
#include <mutex>

namespace syncbn {
namespace {

thread_local int devices_of_driver = 0;

// How many drivers' functions are at work for each device of the process.
class InDrivers {
 public:
  static InDrivers& Get() {
    static InDrivers* const all = new InDrivers;  // operators may outlive static destructors
    return *all;
  }

  void Add(const Device& device, int change) {
    std::lock_guard<std::mutex> lock(mutex_);
    functions_[device] += change;
  }

  bool Has(const Device& device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return functions_[device] > 0;
  }

 private:
  std::mutex mutex_;
  std::map<Device, int> functions_;
};

}  // namespace

void EnterDriver(const Device& device, int devices) {
  devices_of_driver = devices;
  InDrivers::Get().Add(device, 1);
}

void LeaveDriver(const Device& device) {
  devices_of_driver = 0;
  InDrivers::Get().Add(device, -1);
}

CallLog::Epoch CallLog::NoteQueued(const Device& device) {
  Calls& calls = calls_[device];
  ++calls.queued;
  calls.driver = devices_of_driver;
  return epoch_;
}

void CallLog::NoteBegun(const Device& device, Epoch epoch, bool is_first) {
  if (epoch != epoch_) return;
  Calls& calls = calls_[device];
  calls.repeats = !is_first;
  if (is_first) calls.queued = std::max(0, calls.queued - 1);
}

void CallLog::Clear() {
  ++epoch_;
  for (auto& entry : calls_) entry.second.queued = 0;
}

bool CallLog::IsOneOfSeveral(const Device& device) const {
  const auto entry = calls_.find(device);
  return entry != calls_.end() && entry->second.driver > 1;
}

void CallLog::Describe(Absence* absence) const {
  for (const Device& device : absence->arrived) {
    if (InDrivers::Get().Has(device)) absence->in_driver.insert(device);
    const auto entry = calls_.find(device);
    if (entry == calls_.end()) continue;
    absence->driver = std::max(absence->driver, entry->second.driver);
    if (entry->second.queued > 0) absence->again.insert(device);
  }
  const bool known = std::none_of(calls_.begin(), calls_.end(),
                                  [](const auto& entry) { return entry.second.repeats; });
  for (const Device& device : absence->missing) {
    const auto entry = calls_.find(device);
    if (entry == calls_.end()) absence->never.insert(device);
    if (entry != calls_.end() && entry->second.queued > 0) {
      absence->queued.insert(device);
    } else if (known || entry == calls_.end()) {
      absence->idle.insert(device);
    }
  }
}

}  // namespace syncbn
