// The C functions for several processes. None of them needs MXNet. If nothing else is said, a
// function returns 0, or -1 with the text in gluon_syncbn_last_error.
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

syncbn::Communicator& Connected() {
  if (TheCommunicator() != nullptr) return *TheCommunicator();
  throw syncbn::Error(syncbn::Concat(syncbn::kInit, " was not called in this process"));
}

}  // namespace

// Takes over a syncbn::Transport that was made with new.
SYNCBN_EXPORT(int, gluon_syncbn_distributed_open, void* transport) {
  return CatchAll([&] {
    syncbn::OpenCommunicator(
        std::unique_ptr<syncbn::Transport>(static_cast<syncbn::Transport*>(transport)));
  });
}

// numbers[i] becomes the sum over all ranks; calls of one name match by their order on the ranks.
SYNCBN_EXPORT(int, gluon_syncbn_distributed_sum, const char* name, const char* signature,
                                               double* numbers, int64_t size, double timeout) {
  return CatchAll([&] {
    syncbn::Contribution own;
    own.title = name;
    own.signature = signature;
    own.timeout_seconds = timeout;
    own.key = Connected().NextKey(syncbn::Concat("call|", name));
    syncbn::AppendBytes(numbers, static_cast<size_t>(size), &own.payload);
    const auto sums = syncbn::FromBytes<double>(Connected().AllReduce(std::move(own)));
    std::copy(sums.begin(), sums.end(), numbers);
  });
}

// Tells other ranks, if a failure concerns this layer, that this one has frozen it; or no longer.
SYNCBN_EXPORT(int, gluon_syncbn_note_frozen, const char* layer, int is_frozen) {
  return CatchAll([&] { syncbn::NoteFrozen(layer, is_frozen != 0); });
}

// Returns the rank that joined with the most exchanges, or -1.
SYNCBN_EXPORT(int, gluon_syncbn_distributed_join, double timeout) {
  return CatchAll(-1, [&] { return Connected().Join(timeout); });
}

SYNCBN_EXPORT(int, gluon_syncbn_distributed_leave) {
  return CatchAll([&] { Connected().Leave(); });
}

// Waits until all others have left, too, for the timeout at most.
SYNCBN_EXPORT(int, gluon_syncbn_distributed_stop, double timeout) {
  return CatchAll([&] {
    Connected().AwaitLeave(timeout);
    Connected().Stop();
  });
}
