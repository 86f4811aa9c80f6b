// The C functions for several processes. None of them needs MXNet. If nothing else is said, a
// function returns 0, or -1 with the text in gluon_syncbn_last_error.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>

#include "core/c_interface.h"
#include "exchange/table.h"

namespace {

using syncbn::CatchAll;
using syncbn::Table;

}  // namespace

// Takes over a syncbn::Transport that was made with new.
SYNCBN_EXPORT(int, gluon_syncbn_distributed_open, void* transport) {
  return CatchAll([&] {
    Table::Get().Connect(
        std::unique_ptr<syncbn::Transport>(static_cast<syncbn::Transport*>(transport)));
  });
}

// numbers[i] becomes the sum over all ranks; calls of one name match by their order on the ranks.
SYNCBN_EXPORT(int, gluon_syncbn_distributed_sum, const char* name, const char* signature,
                                               double* numbers, int64_t size, double timeout) {
  return CatchAll([&] {
    syncbn::Contribution own;
    own.phase = syncbn::Phase::kCall;
    own.shared_name = name;
    own.signature.text = signature;
    own.numbers.assign(numbers, numbers + size);
    own.timeout_seconds = timeout;
    const syncbn::Numbers sums = Table::Get().Contribute(own, nullptr);
    std::copy(sums.begin(), sums.end(), numbers);
  });
}

SYNCBN_EXPORT(int, gluon_syncbn_distributed_leave) {
  return CatchAll([&] { Table::Get().Leave(); });
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
    constexpr double kAfterFailure = 10;  // some may never leave, and others end soon
    Table::Get().Disconnect(timeout, std::min(timeout, kAfterFailure));
  });
}
