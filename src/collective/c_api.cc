// What Python calls for several processes, see gluon_syncbn/distributed. None of it needs MXNet.
// Where nothing else is said, functions return 0, or -1 with the text in gluon_syncbn_last_error.
#include <algorithm>
#include <cstdint>
#include <string>

#include "collective/processes.h"
#include "core/error.h"
#include "core/last_error.h"

#define SYNCBN_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using syncbn::CatchAll;
using syncbn::TheCommunicator;

thread_local syncbn::Bytes last_result;

}  // namespace

// Takes over a syncbn::Wire that was made with new; returns the rank, or -1.
SYNCBN_EXPORT int gluon_syncbn_distributed_open(void* wire) {
  const int failed = CatchAll([&] {
    syncbn::OpenCommunicator(std::unique_ptr<syncbn::Wire>(static_cast<syncbn::Wire*>(wire)));
  });
  return failed ? -1 : TheCommunicator()->rank();
}

// One exchange of `bytes` bytes at `data`, named `name`; calls of one name match by their order on
// the ranks. `ranks` are `count` ranks in ascending order, none for all. The result stays in
// gluon_syncbn_distributed_result until this thread's next call.
SYNCBN_EXPORT int gluon_syncbn_distributed_exchange(const char* name, const char* contract,
                                                    const char* merger, const int* ranks, int count,
                                                    const char* data, int64_t bytes,
                                                    double timeout, int64_t* result_bytes) {
  return CatchAll([&] {
    syncbn::Contribution contribution;
    contribution.title = name;
    contribution.contract = contract;
    contribution.merger = merger;
    contribution.ranks.assign(ranks, ranks + count);
    contribution.timeout_seconds = timeout;
    contribution.payload.assign(data, data + bytes);
    contribution.key =
        syncbn::Concat("call|", name, '|', TheCommunicator()->NextNumber(name));
    last_result = TheCommunicator()->AllReduce(std::move(contribution));
    *result_bytes = static_cast<int64_t>(last_result.size());
  });
}

// Copies the result of this thread's last exchange, and forgets it.
SYNCBN_EXPORT void gluon_syncbn_distributed_result(char* to) {
  std::copy(last_result.begin(), last_result.end(), to);
  syncbn::Bytes().swap(last_result);
}

// Returns the rank that joined with the most exchanges, or -1.
SYNCBN_EXPORT int gluon_syncbn_distributed_join(double timeout) {
  int rank = -1;
  return CatchAll([&] { rank = TheCommunicator()->Join(timeout); }) == 0 ? rank : -1;
}

SYNCBN_EXPORT void gluon_syncbn_distributed_leave() {
  if (TheCommunicator() != nullptr) TheCommunicator()->Leave();
}

// Whether all others have left too.
SYNCBN_EXPORT int gluon_syncbn_distributed_stop(double timeout) {
  const bool all = TheCommunicator()->AwaitLeave(timeout);
  TheCommunicator()->Stop();
  return all ? 1 : 0;
}
