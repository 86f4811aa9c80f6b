// An exchange is an all-reduce: all devices of a layer contribute numbers, and all receive the
// reduced numbers. table.h runs exchanges.
//
// The places of an exchange are a tree. The leaves are the devices of each rank. A rank reduces the
// parts of its devices and child ranks in their order, and sends the result to its parent. The root
// sends the result back to all ranks. Up to 32 ranks are a star around the first rank. More ranks
// have a star for each 32 neighbours, and a star for each 32 centers of such stars. So a subtree is
// an interval of ranks, and a result never depends on the order of arrival.
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
#include "core/dtype.h"
#include "exchange/clock.h"

namespace syncbn {

using Numbers = std::vector<double>;

enum class Phase : int32_t { kForward, kBackward, kCall };  // kCall: a named call of the program

// kSum adds numbers; kMoments merges (count, mean[C], m2[C]).
enum class Operation : int32_t { kSum, kMoments };

// Identifies an exchange. All contributions to an exchange have its key, whatever their order. No
// other exchange has the key, so a layer can have several pending exchanges.
struct Key {
  bool is_local = false;  // the exchange is only between devices of this process
  std::string layer;      // the layer or the named call; equal on all ranks
  Phase phase = Phase::kForward;
  int64_t call = 0;    // the number of the forward call, also for its backward calls
  int64_t repeat = 0;  // the number of earlier backward calls of this forward call

  std::string Title() const;  // "SyncBatchNorm 'norm0', forward"
};

inline bool operator<(const Key& a, const Key& b) {
  return std::tie(a.is_local, a.call, a.phase, a.repeat, a.layer) <
         std::tie(b.is_local, b.call, b.phase, b.repeat, b.layer);
}

// The properties that must be equal at all places.
struct Signature {
  Operation operation = Operation::kSum;
  DType dtype = DType::kFloat32;
  int64_t channels = 0;
  int64_t axis = 0;
  double epsilon = 0;
  std::string text;  // set for a named call, whose messages show no other field
};

inline bool operator==(const Signature& a, const Signature& b) {
  return std::tie(a.operation, a.dtype, a.channels, a.axis, a.epsilon, a.text) ==
         std::tie(b.operation, b.dtype, b.channels, b.axis, b.epsilon, b.text);
}

// A device of this rank, or a child rank. The reduction uses the order of places.
struct Place {
  int rank = 0;
  Device device{};
};

inline bool operator<(const Place& a, const Place& b) {
  return std::tie(a.rank, a.device) < std::tie(b.rank, b.device);
}

// The contribution of a place.
struct Part {
  Numbers numbers;
  std::vector<int64_t> shape{};  // shape of a device's data, for messages
};

// The ranks that `rank` sends for, and the number of levels below it.
struct Subtree {
  int rank, size, levels;
};

// The position of a rank in the tree.
struct Position {
  int parent = -1;  // -1 at the root
  int depth = 0;    // number of ranks above
  int height = 0;   // levels of the whole tree, without the root
  std::vector<Subtree> children{};
};
// The ranks must include `rank`.
Position PositionOf(int rank, const std::vector<int>& ranks);

class Members;  // table.h

// The state of an exchange at this rank. The table's mutex guards all members except `over`, which
// a waiting thread polls.
struct Exchange {
  Key key;
  Signature signature;
  std::vector<int> ranks;  // ascending; empty if local
  Position position;
  Place first;  // the place that arrived first and gave the signature
  std::map<Place, Part> parts;
  Members* members = nullptr;  // null for a named call, and before the first device arrives
  size_t devices = 0;          // number of devices that must arrive; 0 before the first arrives
  size_t arrived = 0;
  Time start;                  // the first device's arrival
  std::optional<size_t> sent;  // number of numbers that this rank has sent to its parent
  std::atomic<bool> over{false};
  std::condition_variable changed;
  Numbers result;
  std::string error;  // replaces the result

  bool AllDevicesAreHere() const { return devices > 0 && arrived == devices; }
  // Returns the children whose part is missing.
  std::vector<Subtree> Missing() const;
  // Reduces the parts in their order, and clears them. Throws Error if their sizes differ.
  Numbers Reduce();
};

}  // namespace syncbn
