// The C functions for several processes. None of them needs MXNet. If nothing else is said, a
// function returns 0, or -1 with the text in gluon_syncbn_last_error.
// Who uses it: gluon_syncbn/native/world.py and gluon_syncbn/distributed, through ctypes.
#include <algorithm>
#include <cstdint>
#include <string>

#include "collective/processes/communicator.h"
#include "collective/processes/report.h"
#include "core/c_interface.h"
#include "core/error.h"

namespace {

using syncbn::CatchAll;
using syncbn::TheCommunicator;

thread_local syncbn::Bytes last_result;

syncbn::ReduceOperation OperationOf(const std::string& name) {
  using syncbn::ReduceOperation;
  if (name == "concat") return ReduceOperation::kConcat;
  if (name == "sum_float32") return ReduceOperation::kSumFloat32;
  if (name == "sum_float64") return ReduceOperation::kSumFloat64;
  if (name == "sum_int64") return ReduceOperation::kSumInt64;
  throw syncbn::Error(syncbn::Concat("unknown reduce operation \"", name, "\""));
}

syncbn::Communicator& Connected() {
  if (TheCommunicator() != nullptr) return *TheCommunicator();
  throw syncbn::Error(syncbn::Concat(syncbn::kInit, " was not called in this process"));
}

}  // namespace

// Takes over a syncbn::Transport that was made with new; returns the rank, or -1.
SYNCBN_EXPORT int gluon_syncbn_distributed_open(void* transport) {
  return CatchAll(-1, [&] {
    syncbn::OpenCommunicator(
        std::unique_ptr<syncbn::Transport>(static_cast<syncbn::Transport*>(transport)));
    return TheCommunicator()->rank();
  });
}

// One exchange of `bytes` bytes at `data` between all ranks; calls of one name match by their order
// on the ranks. The result stays in gluon_syncbn_distributed_result until this thread's next call.
SYNCBN_EXPORT int gluon_syncbn_distributed_exchange(const char* name, const char* signature,
                                                    const char* operation, const char* data,
                                                    int64_t bytes, double timeout,
                                                    int64_t* result_bytes) {
  return CatchAll([&] {
    syncbn::Contribution contribution;
    contribution.title = name;
    contribution.signature = signature;
    contribution.operation = OperationOf(operation);
    contribution.timeout_seconds = timeout;
    contribution.payload.assign(data, data + bytes);
    contribution.key = Connected().NextKey(syncbn::Concat("call|", name));
    last_result = Connected().AllReduce(std::move(contribution));
    *result_bytes = static_cast<int64_t>(last_result.size());
  });
}

// Tells other ranks, if they wait for this one in a layer, that it has frozen it; or no longer.
SYNCBN_EXPORT int gluon_syncbn_note_frozen(const char* layer, int is_frozen) {
  return CatchAll([&] { syncbn::NoteFrozen(layer, is_frozen != 0); });
}

// Copies the result of this thread's last exchange, and forgets it.
SYNCBN_EXPORT void gluon_syncbn_distributed_result(char* to) {
  std::copy(last_result.begin(), last_result.end(), to);
  syncbn::Bytes().swap(last_result);
}

// Returns the rank that joined with the most exchanges, or -1.
SYNCBN_EXPORT int gluon_syncbn_distributed_join(double timeout) {
  return CatchAll(-1, [&] { return Connected().Join(timeout); });
}

SYNCBN_EXPORT int gluon_syncbn_distributed_leave() {
  return CatchAll([&] { Connected().Leave(); });
}

// 1 if all others have left too, else 0.
SYNCBN_EXPORT int gluon_syncbn_distributed_stop(double timeout) {
  return CatchAll(0, [&] {
    const bool all = Connected().AwaitLeave(timeout);
    Connected().Stop();
    return all ? 1 : 0;
  });
}
