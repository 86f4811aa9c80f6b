// The functions that Python uses through ctypes. If a function returns -1, gluon_syncbn_last_error
// returns the text of its error.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "core/c_interface.h"
#include "core/parallel_for.h"
#include "core/program.h"
#include "exchange/table.h"
#include "kernels/passes.h"
#include "mxnet/mxnet_api.h"
#include "mxnet/native_op.h"
#include "op/layer.h"

using syncbn::CatchAll;
using syncbn::FindLayer;
using syncbn::Layer;
using syncbn::Table;

static const char* native_missing = "";

// Python compares this hash of its declarations, library.py, with the file's hash at import.
SYNCBN_EXPORT(const char*, gluon_syncbn_build_id) { return SYNCBN_BUILD_ID; }

SYNCBN_EXPORT(const char*, gluon_syncbn_last_error) { return syncbn::last_error.c_str(); }

SYNCBN_EXPORT(int, gluon_syncbn_register, const char* libmxnet_path) {
  return CatchAll([&] {
    syncbn::LoadMxnetApi(libmxnet_path);
    syncbn::RegisterOperator();
    native_missing = syncbn::RegisterNativeOperator(libmxnet_path);
  });
}

// The reason why the native operator (mxnet/native_op.h) cannot be used, or "".
SYNCBN_EXPORT(const char*, gluon_syncbn_native_missing) { return native_missing; }

SYNCBN_EXPORT(int64_t, gluon_syncbn_blocked_calls) { return syncbn::CountBlockedCalls(); }

SYNCBN_EXPORT(void, gluon_syncbn_wait_before_fork) { syncbn::WaitBeforeFork(); }

// Creates a layer, which gluon_syncbn_release_layer releases. Returns null after an error.
SYNCBN_EXPORT(void*, gluon_syncbn_create_layer, const char* key, const char* name) {
  return CatchAll<void*>(nullptr, [&] {
    // Threads that train together create their layers first, so none of them waits meanwhile.
    static std::once_flag first;
    std::call_once(first, [] {
      syncbn::ReserveErrors();
      syncbn::GuardForks();
    });
    return new std::shared_ptr<Layer>(syncbn::CreateLayer(key, name));
  });
}

SYNCBN_EXPORT(void, gluon_syncbn_release_layer, void* layer) {
  delete static_cast<std::shared_ptr<Layer>*>(layer);
}

// Sets the options of a layer's next forward calls. `contexts` is like "cpu(0) cpu(1)". If
// `restarts`, the layer also forgets its devices, and no call may be pending.
SYNCBN_EXPORT(int, gluon_syncbn_set_options, const char* key, syncbn::LayerOptions options,
              const char* contexts, const int* ranks, int num_ranks, const char* shared_name,
              int restarts) {
  return CatchAll([&] {
    const auto layer = FindLayer(key);
    layer->SetOptions(
        {options, syncbn::ParseDevices(contexts), {ranks, ranks + num_ranks}, shared_name});
    if (restarts) Table::Get().Restart(&layer->members);
  });
}

// Starts or ends the collection of a layer's moments (CollectedMoments in op/statistics.h).
SYNCBN_EXPORT(int, gluon_syncbn_collect, const char* key, int starts) {
  return CatchAll([&] {
    const auto layer = FindLayer(key);
    starts ? layer->collected.Start() : layer->collected.End();
  });
}

// Writes the first `size` numbers of CollectedMoments::Total. Returns the total's size, or -1.
SYNCBN_EXPORT(int64_t, gluon_syncbn_collected, const char* key, double* numbers, int64_t size) {
  return CatchAll(int64_t{-1}, [&] {
    const syncbn::Numbers found = FindLayer(key)->collected.Total();
    const int64_t total = static_cast<int64_t>(found.size());
    std::copy_n(found.begin(), std::min(size, total), numbers);
    return total;
  });
}

// `devices` is like "cpu(0) cpu(1)"; an empty text means all devices of the layer.
SYNCBN_EXPORT(int, gluon_syncbn_set_participants, const char* key, const char* devices) {
  return CatchAll([&] { FindLayer(key)->SetParticipants(syncbn::ParseDevices(devices)); });
}

// The total seconds that `device`, such as "cpu(0)", has waited in this layer.
SYNCBN_EXPORT(double, gluon_syncbn_wait_seconds, const char* key, const char* device) {
  return CatchAll(0.0, [&] {
    return Table::Get().WaitSeconds(FindLayer(key)->members, syncbn::ParseDevice(device));
  });
}

SYNCBN_EXPORT(double, gluon_syncbn_longest_wait) { return Table::Get().LongestWait(); }

// MXNet's engine runs this to store the time, in seconds of the monotonic clock.
SYNCBN_EXPORT(void, gluon_syncbn_note_time, void* /*run_context*/, void* seconds) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  *static_cast<double*>(seconds) = std::chrono::duration<double>(now).count();
}

// MXNet's engine runs this no-op between earlier and later work on the same arrays.
SYNCBN_EXPORT(void, gluon_syncbn_do_nothing, void* /*run_context*/, void* /*parameter*/) {}

// MXNet runs this on any thread when it deletes an operator whose graph owns an object of Python.
SYNCBN_EXPORT(int, gluon_syncbn_set_flag, void* flag) {
  static_cast<std::atomic<int>*>(flag)->store(1);
  return 1;
}

// `locate` calls gluon_syncbn_tell_where with the lines that the program's threads execute.
SYNCBN_EXPORT(void, gluon_syncbn_set_locator, void (*locate)()) { syncbn::SetLocator(locate); }

SYNCBN_EXPORT(void, gluon_syncbn_tell_where, const char* text) { syncbn::ReportWhere(text); }

SYNCBN_EXPORT(void, gluon_syncbn_set_timeout, double seconds) { syncbn::default_timeout = seconds; }

SYNCBN_EXPORT(double, gluon_syncbn_timeout) { return syncbn::default_timeout; }

// The text of the failure, or "" without one; valid until this thread's next call.
SYNCBN_EXPORT(const char*, gluon_syncbn_failure) {
  thread_local std::string text;
  CatchAll([&] { text = Table::Get().Failure(); });
  return text.c_str();
}

SYNCBN_EXPORT(const char*, gluon_syncbn_status) {
  thread_local std::string text;
  CatchAll([&] { text = Table::Get().Status(); });
  return text.c_str();
}

SYNCBN_EXPORT(int, gluon_syncbn_fail_all, const char* text, int tell_ranks) {
  return CatchAll([&] { Table::Get().Fail(text, tell_ranks != 0); });
}

SYNCBN_EXPORT(int, gluon_syncbn_reset_all) {
  return CatchAll([&] { Table::Get().Reset(); });
}

SYNCBN_EXPORT(const char*, gluon_syncbn_commit) { return SYNCBN_COMMIT; }

SYNCBN_EXPORT(const char*, gluon_syncbn_instruction_set) { return syncbn::cpu::InstructionSet(); }

SYNCBN_EXPORT(const char*, gluon_syncbn_cuda_architectures) { return SYNCBN_CUDA_ARCHITECTURES; }

// The reason why this build has no CUDA, or "".
SYNCBN_EXPORT(const char*, gluon_syncbn_cuda_missing) { return SYNCBN_CUDA_MISSING; }

SYNCBN_EXPORT(int, gluon_syncbn_num_threads) { return syncbn::NumThreads(); }

// Takes ownership of a syncbn::Transport that was created by new.
SYNCBN_EXPORT(int, gluon_syncbn_distributed_open, void* transport) {
  return CatchAll([&] {
    Table::Get().Connect(
        std::unique_ptr<syncbn::Transport>(static_cast<syncbn::Transport*>(transport)));
  });
}

// Sets `all` to the `total` numbers of all ranks, in the order of ranks, valid until this thread's
// next call. The n-th call of a rank with a name gathers from the n-th calls of the other ranks
// with this name.
SYNCBN_EXPORT(int, gluon_syncbn_distributed_gather, const char* name, const double* numbers,
              int64_t size, double timeout, const double** all, int64_t* total) {
  thread_local syncbn::Numbers gathered;
  return CatchAll([&] {
    syncbn::Contribution own;
    own.phase = syncbn::Phase::kCall;
    own.shared_name = name;
    own.signature.operation = syncbn::Operation::kConcat;
    own.numbers.assign(numbers, numbers + size);
    own.timeout_seconds = timeout;
    gathered = Table::Get().Contribute(std::move(own), nullptr);
    *all = gathered.data();
    *total = static_cast<int64_t>(gathered.size());
  });
}

SYNCBN_EXPORT(int, gluon_syncbn_distributed_leave) {
  return CatchAll([&] { Table::Get().Leave(); });
}

// Prints `text` and ends the process after `seconds`, unless this function is called again before.
// An empty text only cancels the earlier call. A timer in Python could not run while the import of
// mpi4py (distributed/connection.py) holds the GIL.
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

// Leaves, and waits until all other ranks have left, at most for the timeout.
SYNCBN_EXPORT(int, gluon_syncbn_distributed_stop, double timeout) {
  return CatchAll([&] {
    constexpr double kAfterFailure = 10;  // a rank that hangs never leaves
    Table::Get().Disconnect(timeout, std::min(timeout, kAfterFailure));
  });
}
