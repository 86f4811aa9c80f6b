// The C functions for several processes, none of which needs MXNet. A function returns 0, or -1
// with the text in gluon_syncbn_last_error.
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

// Takes ownership of a syncbn::Transport that was created by new.
SYNCBN_EXPORT(int, gluon_syncbn_distributed_open, void* transport) {
  return CatchAll([&] {
    Table::Get().Connect(
        std::unique_ptr<syncbn::Transport>(static_cast<syncbn::Transport*>(transport)));
  });
}

// Sets numbers[i] to the sum over all ranks. Calls with the same name match by their order.
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

// Ends the process with this text after so many seconds, unless there is another call before. A
// Python thread could not end a call that holds the GIL, like mpi4py's call of MPI_Init.
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

// Waits until all other ranks have left, at most for the timeout.
SYNCBN_EXPORT(int, gluon_syncbn_distributed_stop, double timeout) {
  return CatchAll([&] {
    constexpr double kAfterFailure = 10;  // some ranks may never leave; others end soon
    Table::Get().Disconnect(timeout, std::min(timeout, kAfterFailure));
  });
}
