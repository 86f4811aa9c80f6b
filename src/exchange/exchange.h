// One exchange: all devices of a layer contribute numbers, and all receive these reduced. This file
// says what an exchange is; table.h says how it goes on and ends.
//
// The places of an exchange make a tree. Each rank has its own devices as leaves, and reduces their
// parts and those of its child ranks in the order of ranks and devices. It sends the result to its
// parent, or, at the root, back to all. Up to 32 ranks are a star around the first. Of more ranks,
// each 32 neighbours have a star around the first of them, and so have each 32 of those. So a
// subtree is an interval of ranks, and a result never depends on who arrived first.
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

enum class Phase : int32_t { kForward, kBackward, kCall };  // kCall: of the program, by a name

// The numbers are a sum's terms, or (count, mean[C], m2[C]).
enum class Operation : int32_t { kSum, kMoments };

// What all contributions to an exchange have. Exchanges match by it, never by their order, and each
// key is used once: a layer can have several exchanges in flight.
struct Key {
  bool is_local = false;  // of this process alone; no other rank sees such a key
  std::string layer;      // or the name of a call; equal on all ranks
  Phase phase = Phase::kForward;
  int64_t call = 0;    // the number of the forward call, which its backward calls have too
  int64_t repeat = 0;  // backward calls of this forward call before this one

  std::string Title() const;  // "SyncBatchNorm 'norm0', forward"
};

inline bool operator<(const Key& a, const Key& b) {
  return std::tie(a.is_local, a.call, a.phase, a.repeat, a.layer) <
         std::tie(b.is_local, b.call, b.phase, b.repeat, b.layer);
}

// What must be equal at all places.
struct Signature {
  Operation operation = Operation::kSum;
  DType dtype = DType::kFloat32;
  int64_t channels = 0;
  int64_t axis = 0;
  double epsilon = 0;
  std::string text;  // of a call; no other field is shown then
};

inline bool operator==(const Signature& a, const Signature& b) {
  return std::tie(a.operation, a.dtype, a.channels, a.axis, a.epsilon, a.text) ==
         std::tie(b.operation, b.dtype, b.channels, b.axis, b.epsilon, b.text);
}

// A device of this rank, or a child rank. The order of places is that of the reduction.
struct Place {
  int rank = 0;
  Device device{};
};

inline bool operator<(const Place& a, const Place& b) {
  return std::tie(a.rank, a.device) < std::tie(b.rank, b.device);
}

// What a place has contributed.
struct Part {
  Numbers numbers;
  std::vector<int64_t> shape{};  // of a device's data, for messages
};

// Ranks that one rank sends for, and the levels of ranks below that one.
struct Subtree {
  int rank, size, levels;
};

// Where a rank stands in the tree over `ranks`, which hold it.
struct Position {
  int parent = -1;  // none at the root
  int depth = 0;    // ranks above it
  int height = 0;   // levels of the whole tree, without the root
  std::vector<Subtree> children{};
};
Position PositionOf(int rank, const std::vector<int>& ranks);

class Members;  // table.h

// At this rank. Its table guards it with a mutex, but for `over`, which a waiting thread polls.
struct Exchange {
  Key key;
  Signature signature;
  std::vector<int> ranks;  // ascending; empty for this process alone
  Position position;
  Place first;  // the place that arrived first, whose signature it is
  std::map<Place, Part> parts;
  Members* members = nullptr;  // null for a call of the program, or while no device is here
  size_t devices = 0;  // that must arrive here; 0 while none has
  size_t arrived = 0;
  Time start;           // the first device's arrival
  std::optional<size_t> sent;  // how many numbers went to the parent
  std::atomic<bool> over{false};
  std::condition_variable changed;
  Numbers result;
  std::string error;  // in place of a result

  bool AllDevicesAreHere() const { return devices > 0 && arrived == devices; }
  // The children whose part is missing.
  std::vector<Subtree> Missing() const;
  // The parts as one, in their order; they are gone then. Throws Error if they do not fit.
  Numbers Reduce();
};

}  // namespace syncbn
