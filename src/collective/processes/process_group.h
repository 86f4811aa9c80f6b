// The processes of one program, and how a process exchanges numbers with the others.
// Who uses it: devices/group.h, for one exchange of each rendezvous, and c_api.cc. It must not know
// the transport, nor what the bytes mean.
//
// What the processes promise each other:
// * Exchanges match by key. Ranks may begin them in any order, and many may be in flight.
// * Payloads are reduced in the order of ranks, and every rank gets the same bytes.
// * Every wait ends: with the result, or with an error that names the ranks that are missing, and
//   says of each whether it lives. A rank that dies is named within the timeout of its death.
// * A failure of one rank is a failure of all: every exchange ends with its text, on every rank,
//   and none begins before that rank has reset. Ranks may reset at different times; messages carry
//   the generation, so old ones are ignored and early ones kept.
// * A rank that has joined contributes nothing more, but reduces and passes on what others
//   contribute, until all ranks have joined. Then a new generation begins.
// * A rank that leaves says so, and exchanges that need it end at once.
//
// transport.h carries the bytes, message.h gives them a form, protocol.h has the rules, without
// threads or clock, and communicator.h adds both.
#pragma once
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "collective/common/bytes.h"
#include "collective/common/reduce_operation.h"

namespace syncbn {

// The span of time in which calls are numbered from zero.
struct Generation {
  int32_t recoveries = 0;  // from failures
  int32_t joins = 0;       // of all ranks, since the latest recovery
};

inline bool operator<(const Generation& a, const Generation& b) {
  return std::tie(a.recoveries, a.joins) < std::tie(b.recoveries, b.joins);
}
inline bool operator==(const Generation& a, const Generation& b) { return !(a < b) && !(b < a); }

// One process's part in an exchange. Exchanges match by `key`, never by the order of calls.
struct Contribution {
  std::string key;        // equal on all ranks, and used once in a generation
  std::string title;      // begins messages: "SyncBatchNorm 'norm0', forward"
  std::string signature;  // must be equal on all ranks: "channels=64, dtype=float32"
  ReduceOperation operation = ReduceOperation::kSumFloat64;
  std::vector<int> ranks;  // of the exchange, ascending; empty for all
  double timeout_seconds = 0;
  Bytes payload;
};

class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;

  virtual int size() const = 0;

  // Blocks until every rank has contributed or has joined; returns all payloads reduced in the
  // order of ranks, the same bytes on every rank. Throws Error that names the ranks present and
  // missing if that takes longer than the timeout, if signatures differ, or if another rank has
  // failed.
  virtual Bytes AllReduce(Contribution contribution) = 0;

  // Changes after a failure, and when all ranks have joined.
  virtual Generation generation() const = 0;

  // Fails the exchanges of this process and of all others, until Reset.
  virtual void Fail(const std::string& text) = 0;
};

// The processes that this one was started with; null until they are connected. Lives as long as the
// process.
ProcessGroup* TheProcessGroup();

}  // namespace syncbn
