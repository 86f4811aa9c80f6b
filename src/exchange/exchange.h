// One exchange: all devices of a layer contribute numbers, and all receive the reduced numbers.
//
// The ranks form a tree, and each rank's devices are leaves of it. A rank reduces the numbers of
// its devices and child ranks in the order of ranks and devices, and sends the result to its
// parent. The root sends the total back. If there are at most `arity` ranks (32, fewer in a test),
// the first is the parent of the others. More ranks form groups of so many neighbours, and the
// first ranks of the groups form such a tree again.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/device.h"
#include "core/moments.h"
#include "core/tensor.h"
#include "exchange/wait.h"

namespace syncbn {

enum class Phase : int32_t { kForward, kBackward, kCall };  // kCall: a named gather without a layer

// The numbers are the terms of sums, moments (count, mean[C], m2[C]), or pieces of one list.
enum class Operation : int32_t { kSum, kMoments, kConcat };

// Identifies an exchange. All its devices and ranks use the same key, and no other exchange does.
// A layer can have several pending exchanges.
struct Key {
  bool is_local = false;  // no other rank takes part or sees the key
  std::string layer;      // the name of the layer or call, equal on all ranks
  Phase phase = Phase::kForward;
  // The number of the forward call. Its backward calls have the same number, because a device
  // begins a further one only after all have completed the one before.
  int64_t call = 0;

  std::string Title() const;  // "SyncBatchNorm 'norm0', forward"
};

inline bool operator<(const Key& a, const Key& b) {
  return std::tie(a.is_local, a.call, a.phase, a.layer) <
         std::tie(b.is_local, b.call, b.phase, b.layer);
}

// The properties that must be equal on all devices and ranks.
struct Signature {
  Operation operation = Operation::kSum;
  DType dtype = DType::kFloat32;
  int64_t channels = 0;
  int64_t axis = 0;
  double epsilon = 0;
  // The ranks that synchronize, ascending; empty for this process alone. In the argument of
  // Table::Begin empty stands for all ranks.
  std::vector<int> ranks{};
};

inline bool operator==(const Signature& a, const Signature& b) {
  return std::tie(a.operation, a.dtype, a.channels, a.axis, a.epsilon, a.ranks) ==
         std::tie(b.operation, b.dtype, b.channels, b.axis, b.epsilon, b.ranks);
}

// A contributor of a Part: a device of this rank, or a child rank with all its devices.
struct Place {
  int rank = 0;
  Device device{};
};

inline bool operator<(const Place& a, const Place& b) {
  return std::tie(a.rank, a.device) < std::tie(b.rank, b.device);
}

// The contribution of a Place.
struct Part {
  Numbers numbers;
  std::vector<int64_t> shape{};  // the shape of the device's data, for errors
};

// A rank, and how many ranks it sends for.
struct Subtree {
  int rank, size;
};

// The position of a rank in the tree of an exchange's ranks.
struct Position {
  int parent = -1;  // none at the root
  int depth = 0;    // the number of ranks above this rank
  int height = 0;   // levels of the whole tree, without the root
  std::vector<Subtree> children{};
};
// Returns a position without others if `ranks` lacks `rank`.
Position PositionOf(int rank, const std::vector<int>& ranks, int arity);

struct Members;  // table.h

// The state of an exchange on this rank. The Table's mutex guards all fields except `over`.
struct Exchange {
  Key key;
  Signature signature;
  Position position;
  Place first;  // the first device to arrive, else the first child rank; for errors
  std::map<Place, Part> parts;
  Members* members = nullptr;  // null for a named gather, or while no device has arrived
  size_t devices = 0;          // how many must arrive; 0 while none has
  size_t arrived = 0;
  Time start;                  // the first device's arrival
  std::optional<size_t> sent;  // how many numbers this rank has sent to its parent
  std::atomic<bool> over{false};
  std::condition_variable changed;
  Numbers result;
  std::string error;  // empty if there is a result

  bool AllDevicesAreHere() const { return devices > 0 && arrived == devices; }
  // Returns the children whose part is missing, or the parent if its answer is missing.
  std::vector<Subtree> Missing() const;
  // Reduces the parts in the order of their places and clears them. Throws Error if sizes
  // differ that must be equal.
  Numbers Reduce();
};

}  // namespace syncbn
