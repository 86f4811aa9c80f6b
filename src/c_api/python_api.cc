// The functions that the package calls through ctypes: registration, timeout, failures, lifetime of
// a layer's group. Functions that return nothing else return 0, or -1 with the text in
// gluon_syncbn_last_error.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/c_interface.h"
#include "core/freed_memory.h"
#include "core/parallel_for.h"
#include "core/program.h"
#include "kernels/cpu/batch_norm_cpu.h"
#include "kernels/cuda/batch_norm_cuda.h"
#include "mxnet/callbacks.h"
#include "mxnet/custom_op.h"
#include "mxnet/fork.h"
#include "mxnet/guard.h"
#include "mxnet/mxnet_api.h"
#include "op/registry.h"

using syncbn::CatchAll;
using syncbn::Layer;
using syncbn::Registry;
using syncbn::Table;

namespace {

std::shared_ptr<Layer> LayerOf(const char* key) { return Registry::Get().Find(key); }

}  // namespace

// The lines of core/c_interface.h, which the package compares with what it calls.
SYNCBN_EXPORT(const char*, gluon_syncbn_interface) { return syncbn::Interface().c_str(); }

SYNCBN_EXPORT(const char*, gluon_syncbn_last_error) { return syncbn::LastError().c_str(); }

SYNCBN_EXPORT(int, gluon_syncbn_register, const char* libmxnet_path) {
  return CatchAll([&] {
    syncbn::LoadMxnetApi(libmxnet_path);
    syncbn::RegisterCustomOp();
  });
}

// To be called before a fork, without the GIL.
SYNCBN_EXPORT(void, gluon_syncbn_wait_before_fork) { syncbn::WaitBeforeFork(); }

// See mxnet/guard.h.
SYNCBN_EXPORT(int, gluon_syncbn_call_guarded, const char* guard, int begins) {
  return CatchAll([&] { syncbn::CallGuarded(guard, begins != 0); });
}

SYNCBN_EXPORT(int, gluon_syncbn_create_layer, const char* key, const char* layer, int has_block) {
  return CatchAll([&] { Registry::Get().Keep(key, layer, has_block != 0); });
}

SYNCBN_EXPORT(int, gluon_syncbn_release_layer, const char* key) {
  return CatchAll([&] { Registry::Get().Release(key); });
}

// Starts or ends the collection of a group's moments, see op/collected_moments.h.
SYNCBN_EXPORT(int, gluon_syncbn_collect, const char* key, int starts) {
  return CatchAll([&] {
    const auto layer = LayerOf(key);
    starts ? layer->collected.Start() : layer->collected.End();
  });
}

// Writes the first `size` of the collected numbers; returns how many there are, -1 for an error.
SYNCBN_EXPORT(int64_t, gluon_syncbn_collected, const char* key, double* numbers, int64_t size) {
  return CatchAll(int64_t{-1}, [&] {
    const std::vector<double> found = LayerOf(key)->collected.Numbers();
    const int64_t total = static_cast<int64_t>(found.size());
    std::copy_n(found.begin(), std::min(size, total), numbers);
    return total;
  });
}

// `devices` is "cpu(0) cpu(1)"; an empty text means all devices of the group.
SYNCBN_EXPORT(int, gluon_syncbn_set_participants, const char* key, const char* devices) {
  return CatchAll([&] {
    Table::Get().SetParticipants(&LayerOf(key)->members, syncbn::ParseDevices(devices));
  });
}

// Seconds that devices have waited for others in this layer, summed over devices.
SYNCBN_EXPORT(double, gluon_syncbn_wait_seconds, const char* key) {
  return CatchAll(0.0, [&] { return Table::Get().WaitSeconds(LayerOf(key)->members); });
}

// Seconds that the longest wait of a device has lasted.
SYNCBN_EXPORT(double, gluon_syncbn_longest_wait) {
  return CatchAll(0.0, [] { return Table::Get().LongestWait(); });
}

// ---- times and failures ------------------------------------------------------------------------

// For MXEnginePushSync: notes when MXNet runs it, in seconds of the monotonic clock.
SYNCBN_EXPORT(void, gluon_syncbn_note_time, void* /*run_context*/, void* seconds) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  *static_cast<double*>(seconds) = std::chrono::duration<double>(now).count();
}

// For MXEnginePushSync: what is pushed for its dependencies alone.
SYNCBN_EXPORT(void, gluon_syncbn_do_nothing, void* /*run_context*/, void* /*parameter*/) {}

// See core/program.h.
SYNCBN_EXPORT(void, gluon_syncbn_set_locator, void (*locate)()) { syncbn::SetLocator(locate); }

SYNCBN_EXPORT(void, gluon_syncbn_tell_where, const char* text) { syncbn::TellWhere(text); }

SYNCBN_EXPORT(void, gluon_syncbn_set_timeout, double seconds) { syncbn::default_timeout = seconds; }

SYNCBN_EXPORT(double, gluon_syncbn_timeout) { return syncbn::default_timeout; }

// The text of the failure, "" if there is none; valid until this thread's next call.
SYNCBN_EXPORT(const char*, gluon_syncbn_failure) {
  thread_local std::string text;
  CatchAll([&] { text = Table::Get().Failure(); });
  return text.c_str();
}

// Other processes learn of it if they can be waiting for this one; with `everywhere` in any case.
SYNCBN_EXPORT(int, gluon_syncbn_fail_all, const char* text, int everywhere) {
  return CatchAll([&] { Table::Get().Fail(text, everywhere != 0); });
}

SYNCBN_EXPORT(int, gluon_syncbn_reset_all) {
  return CatchAll([&] { Table::Get().Reset(); });
}

// Of the checkout that was built; empty where the build does not know it.
SYNCBN_EXPORT(const char*, gluon_syncbn_commit) { return SYNCBN_COMMIT; }

SYNCBN_EXPORT(const char*, gluon_syncbn_instruction_set) { return syncbn::cpu::InstructionSet(); }

// The architectures that the library has machine code for; empty in a build without CUDA.
SYNCBN_EXPORT(const char*, gluon_syncbn_cuda_architectures) {
#if defined(SYNCBN_CUDA)
  return syncbn::cuda::Architectures();
#else
  return "";
#endif
}

// Why a build has no CUDA; empty in one that has.
SYNCBN_EXPORT(const char*, gluon_syncbn_cuda_missing) {
#if defined(SYNCBN_CUDA)
  return "";
#else
  return SYNCBN_CUDA_MISSING;
#endif
}

SYNCBN_EXPORT(int, gluon_syncbn_keep_freed_memory) { return syncbn::KeepFreedMemory() ? 1 : 0; }

SYNCBN_EXPORT(int, gluon_syncbn_num_threads) { return syncbn::NumThreads(); }
