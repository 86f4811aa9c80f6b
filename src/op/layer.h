// A layer, which operators find by its key: its options, and the state that its devices share.
#pragma once
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "exchange/table.h"
#include "op/options.h"
#include "op/statistics.h"

namespace syncbn {

class Layer {
 public:
  explicit Layer(const std::string& name) : members(name) {}

  // A call keeps the pointer, so later changes do not change the call's options.
  std::shared_ptr<const Options> options() const { return std::atomic_load(&options_); }
  void SetOptions(Options options);
  // Sets the devices that take part in the next forward calls; none means all.
  void SetParticipants(std::set<Device> participants);

  Members members;  // the devices that call the layer
  CollectedMoments collected;

 private:
  void Update();

  std::mutex mutex_;  // guards the arguments of the latest SetOptions and SetParticipants
  Options given_;
  std::set<Device> participants_;
  std::shared_ptr<const Options> options_ = std::make_shared<const Options>();
};

// Creates a layer, which exists until its last pointer is deleted. The key must be unique.
std::shared_ptr<Layer> CreateLayer(const std::string& key, const std::string& name);
// Throws Error if there is no such layer.
std::shared_ptr<Layer> FindLayer(const std::string& key);

}  // namespace syncbn
