// The devices of a layer in this process, and the numbers of their forward calls. A Table guards it
// with its mutex.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "core/device.h"

namespace syncbn {

// The devices of a call; null for all devices of the layer.
using Participants = std::shared_ptr<const std::set<Device>>;

// A forward call of a device. Its backward calls need it.
struct Ticket {
  int64_t number = 0;  // the same on all devices and ranks
  int64_t generation = 0;
  Participants participants{};
};

class Members {
 public:
  explicit Members(std::string layer) : layer(std::move(layer)) { ++alive; }
  ~Members() { --alive; }
  Members(const Members&) = delete;

  const std::string layer;
  static inline std::atomic<int> alive{0};

  bool Has(const Device& device) const { return next_.count(device) > 0; }
  bool HasMoved(const Device& device) const { return former_.count(device) > 0; }
  std::set<Device> Devices() const;
  int64_t generation() const { return generation_; }

  // Number a forward call of `device`. The first device to make a call takes the number from
  // `next_number`. Throws Error if `device` does not participate, or if more than `size` devices
  // are in use; `is_busy` means that a device waits in the layer.
  Ticket Enter(const Device& device, size_t size, bool is_busy, int64_t* next_number);
  // Forget the number of the call that `device` has made last: no other device will make it.
  void Complete(const Device& device) { numbers_.erase(next_.at(device) - 1); }

  // Expect only these devices from the next forward call on; none means all.
  void SetParticipants(std::set<Device> participants);
  // Forget all devices. Their tickets are not valid any more.
  void Restart();

  std::map<Device, double> wait_seconds;
  int64_t resets = 0;  // the resets of the table that this layer has followed

 private:
  // All devices continue with the same call.
  void Level();
  // Continue with a new generation of devices.
  void Clear();

  std::map<Device, int64_t> next_;      // each device's next call
  int64_t start_ = 0;                   // a new device's first call
  std::map<int64_t, int64_t> numbers_;  // numbers of the calls that not all devices have made
  std::set<Device> former_;             // devices before the net moved
  Participants participants_;
  int64_t generation_ = 0;
};

}  // namespace syncbn
