// The processes of one program, and how a process brings its share to the others.
// Who uses it: Group, for one exchange per round, and c_api.cc. It must not know by what medium
// the processes talk, nor what the bytes mean.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "collective/wire.h"

namespace syncbn {

// One process's part in an exchange. Exchanges match by `key`, never by the order of calls.
struct Contribution {
  std::string key;       // equal on all ranks, and used once in an era
  std::string title;     // begins messages: "SyncBatchNorm 'norm0', forward"
  std::string contract;  // must be equal on all ranks, for example "channels=64, dtype=float32"
  std::string merger;    // name of a merger
  std::vector<int> ranks;  // who takes part, ascending; empty for all
  double timeout_seconds = 0;
  Bytes payload;
};

class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Blocks until every rank has brought its contribution or has joined; returns all payloads
  // merged in the order of ranks, the same bytes on every rank. Throws Error that names the ranks
  // present and missing if that takes longer than the timeout, if contracts differ, or if another
  // rank has failed.
  virtual Bytes AllReduce(Contribution contribution) = 0;

  // Changes when the numbers in keys begin anew: after a failure, and when all ranks have joined.
  virtual int64_t Era() const = 0;

  // Fails the exchanges of this process and of all others, until Reset.
  virtual void Fail(const std::string& text) = 0;
};

// The processes that this one was started with; null until they have met. Lives as long as the
// process.
ProcessGroup* TheProcessGroup();

}  // namespace syncbn
