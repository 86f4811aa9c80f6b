// Makes numbers of the whole batch of those that a device has of its shard. It must not know how
// they are computed.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "collective/devices/group.h"
#include "core/layout.h"
#include "op/options.h"
#include "op/tensor.h"

namespace syncbn {

// Of each channel, in a shard or in the whole batch.
struct BatchMoments {
  double count;  // elements per channel
  std::vector<double> mean, m2;
};
struct GradientSums {
  std::vector<double> dz, dz_xmu;
};

// A forward call, or a backward call of one.
struct Call {
  const char* phase;  // "forward" or "backward"
  const Tensor& x;    // others' must have its dtype, and its channels
  const Layout& layout;
  Ticket* ticket;  // gets the key by which all ranks know the call
  int64_t repeat;  // backward calls of this forward call before this one
};

class BatchExchange {
 public:
  // `device` is the rank among those of the group. All three outlive this object.
  BatchExchange(const Options& options, const Device& device, Group* group)
      : options_(options), device_(device), group_(group) {}

  // Numbers a forward call. Throws Error, as all below.
  Ticket BeginForward();

  // Block until all others have come; return at once if there are none.
  BatchMoments Merge(const Call& call, BatchMoments own);
  GradientSums Add(const Call& call, GradientSums own);
  // Lines of text, in the order of ranks and devices. In a forward call, after Merge.
  std::string Join(const Call& call, const std::string& own);

  // Fails all who wait, now and later, with this text; other processes too if they may wait for
  // this call. They notice no exchange that has not begun.
  [[noreturn]] void Fail(const std::string& text, bool between_processes);

  // The rank of this process; -1 if the layer synchronizes with no other.
  int Rank() const;

 private:
  std::vector<double> AllReduce(const Call& call, ReduceOperation operation,
                                const std::vector<double>& own);
  AllReduceOptions OptionsOf(const Call& call) const;
  bool IsAlone() const { return options_.num_devices <= 1 && Processes() == nullptr; }
  Communicator* Processes() const;

  const Options& options_;
  const Device& device_;
  Group* const group_;
};

}  // namespace syncbn
