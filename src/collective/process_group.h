// The processes of one program, and how a process exchanges numbers with the others.
// Who uses it: Group, for one exchange of each rendezvous, and c_api.cc. It must not know the
// transport, nor what the bytes mean.
#pragma once
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "collective/bytes.h"

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
  std::string operation;  // the name of a reduce operation
  std::vector<int> ranks;  // that take part, ascending; empty for all
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
