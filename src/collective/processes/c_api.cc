// The C functions for several processes. None of them needs MXNet. If nothing else is said, a
// function returns 0, or -1 with the text in gluon_syncbn_last_error.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>

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
    if (static_cast<int64_t>(sums.size()) != size) syncbn::Refuse();
    std::copy(sums.begin(), sums.end(), numbers);
  });
}

// Tells other ranks, if a failure concerns this layer, that this one has frozen it; or no longer.
SYNCBN_EXPORT(int, gluon_syncbn_note_frozen, const char* layer, int is_frozen) {
  return CatchAll([&] { syncbn::NoteFrozen(layer, is_frozen != 0); });
}

SYNCBN_EXPORT(int, gluon_syncbn_distributed_leave) {
  return CatchAll([&] { Connected().Leave(); });
}

// Ends the process with this text after so many seconds, unless it is called again before. Another
// thread cannot end a call that holds Python's lock, as mpi4py's of MPI_Init does.
SYNCBN_EXPORT(int, gluon_syncbn_exit_after, double seconds, const char* text) {
  static std::atomic<int> calls{0};
  return CatchAll([&, text = std::string(text)] {
    const int call = ++calls;
    if (text.empty()) return;
    std::thread([=] {
      std::this_thread::sleep_for(syncbn::ToDuration(seconds));
      if (calls != call) return;
      std::fprintf(stderr, "%s\n", text.c_str());
      _exit(1);
    }).detach();
  });
}

// Waits until all others have left, too, for the timeout at most.
SYNCBN_EXPORT(int, gluon_syncbn_distributed_stop, double timeout) {
  return CatchAll([&] {
    Connected().AwaitLeave(timeout);
    Connected().Stop();
  });
}
