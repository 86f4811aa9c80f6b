// The functions that the package calls through ctypes: registration, timeout, failures, lifetime of
// a layer's group.
// Who uses it: gluon_syncbn/. Functions that return nothing else return 0, or -1 with the text in
// gluon_syncbn_last_error.
#include <chrono>
#include <cstdint>
#include <string>

#include "collective/communicator.h"
#include "collective/registry.h"
#include "core/c_interface.h"
#include "core/parallel_for.h"
#include "kernels/cpu/batch_norm_cpu.h"
#include "kernels/cuda/batch_norm_cuda.h"
#include "mxnet/custom_op.h"
#include "mxnet/fork.h"
#include "mxnet/mxnet_api.h"

using syncbn::CatchAll;
using syncbn::Registry;

SYNCBN_EXPORT const char* gluon_syncbn_last_error() { return syncbn::LastError().c_str(); }

SYNCBN_EXPORT int gluon_syncbn_register(const char* libmxnet_path) {
  return CatchAll([&] {
    syncbn::LoadMxnetApi(libmxnet_path);
    syncbn::RegisterCustomOp();
    syncbn::ArmForkGuard();
  });
}

// To be called before a fork, without the GIL.
SYNCBN_EXPORT void gluon_syncbn_wait_before_fork() { syncbn::WaitBeforeFork(); }

SYNCBN_EXPORT int gluon_syncbn_create_group(const char* key, const char* layer) {
  return CatchAll([&] { Registry::Get().FindOrCreate(key, layer); });
}

SYNCBN_EXPORT int gluon_syncbn_release_group(const char* key) {
  return CatchAll([&] { Registry::Get().Release(key); });
}

SYNCBN_EXPORT int64_t gluon_syncbn_batches(const char* key) {
  return CatchAll(int64_t{0}, [&] {
    const auto group = Registry::Get().Find(key);
    return group ? group->Batches() : 0;
  });
}

SYNCBN_EXPORT int gluon_syncbn_set_batches(const char* key, int64_t batches) {
  return CatchAll([&] {
    const auto group = Registry::Get().Find(key);
    if (group) group->SetBatches(batches);
  });
}

// `devices` is "cpu(0) cpu(1)"; an empty text means all devices of the group.
SYNCBN_EXPORT int gluon_syncbn_set_participants(const char* key, const char* devices) {
  return CatchAll([&] {
    const auto group = Registry::Get().Find(key);
    if (group) group->SetParticipants(syncbn::ParseDevices(devices));
  });
}

// Seconds that devices have waited for others in this layer, summed over devices.
SYNCBN_EXPORT double gluon_syncbn_wait_seconds(const char* key) {
  return CatchAll(0.0, [&] {
    const auto group = Registry::Get().Find(key);
    return group ? group->WaitSeconds() : 0.0;
  });
}

SYNCBN_EXPORT int64_t gluon_syncbn_first_operators() { return syncbn::FirstOperators(); }

// For MXEnginePushSync: notes when MXNet runs it, in seconds of the monotonic clock.
SYNCBN_EXPORT void gluon_syncbn_note_time(void* /*run_context*/, void* seconds) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  *static_cast<double*>(seconds) = std::chrono::duration<double>(now).count();
}

SYNCBN_EXPORT void gluon_syncbn_set_timeout(double seconds) {
  syncbn::SetDefaultTimeout(seconds);
}

SYNCBN_EXPORT double gluon_syncbn_timeout() { return syncbn::DefaultTimeout(); }

// The text of the first failed layer, else of the processes, "" if none; valid until this thread's
// next call.
SYNCBN_EXPORT const char* gluon_syncbn_failure() {
  thread_local std::string text;
  CatchAll([&] {
    text = Registry::Get().FirstFailure();
    if (text.empty() && syncbn::TheCommunicator() != nullptr) {
      text = syncbn::TheCommunicator()->Failure();
    }
  });
  return text.c_str();
}

// Other processes learn of it if they can be waiting for this one; with `everywhere` in any case.
SYNCBN_EXPORT int gluon_syncbn_fail_all(const char* text, int everywhere) {
  return CatchAll([&] {
    if (everywhere && syncbn::TheCommunicator() != nullptr) syncbn::TheCommunicator()->Fail(text);
    Registry::Get().FailAll(text);
  });
}

SYNCBN_EXPORT int gluon_syncbn_reset_all() {
  return CatchAll([&] {
    Registry::Get().ResetAll();
    if (syncbn::TheCommunicator() != nullptr) syncbn::TheCommunicator()->Reset();
  });
}

// Of the checkout that was built; empty where the build does not know it.
SYNCBN_EXPORT const char* gluon_syncbn_commit() { return SYNCBN_COMMIT; }

SYNCBN_EXPORT const char* gluon_syncbn_instruction_set() { return syncbn::cpu::InstructionSet(); }

// The architectures that there is machine code for; empty in a build without CUDA.
SYNCBN_EXPORT const char* gluon_syncbn_cuda_architectures() {
#if defined(SYNCBN_CUDA)
  return syncbn::cuda::Architectures();
#else
  return "";
#endif
}

// Why a build has no CUDA; empty in one that has.
SYNCBN_EXPORT const char* gluon_syncbn_cuda_missing() {
#if defined(SYNCBN_CUDA)
  return "";
#else
  return SYNCBN_CUDA_MISSING;
#endif
}

SYNCBN_EXPORT int gluon_syncbn_num_threads() { return syncbn::NumThreads(); }
