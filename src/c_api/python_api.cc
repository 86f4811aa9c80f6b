// The functions that the package calls through ctypes: registration, timeout, failures, lifetime of
// a layer's group.
// Who uses it: gluon_syncbn/. Functions that return nothing else return 0, or -1 with the text in
// gluon_syncbn_last_error.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective/processes/communicator.h"
#include "core/c_interface.h"
#include "core/freed_memory.h"
#include "core/parallel_for.h"
#include "kernels/cpu/batch_norm_cpu.h"
#include "kernels/cuda/batch_norm_cuda.h"
#include "mxnet/callbacks.h"
#include "mxnet/commit.h"
#include "mxnet/custom_op.h"
#include "mxnet/fork.h"
#include "mxnet/mxnet_api.h"
#include "op/registry.h"
#include "op/single_value.h"

using syncbn::CatchAll;
using syncbn::Layer;
using syncbn::Registry;

namespace {

std::shared_ptr<Layer> LayerOf(const char* key) { return Registry::Get().Find(key); }

std::vector<syncbn::Arrays> Groups(void** arrays, const int* sizes, int num_groups) {
  std::vector<syncbn::Arrays> groups;
  for (int i = 0; i < num_groups; arrays += sizes[i++]) {
    groups.emplace_back(arrays, arrays + sizes[i]);
  }
  return groups;
}

}  // namespace

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

SYNCBN_EXPORT int gluon_syncbn_create_group(const char* key, const char* layer, int has_block) {
  return CatchAll([&] {
    const auto created = Registry::Get().FindOrCreate(key, layer);
    if (has_block) created->has_block = true;
  });
}

SYNCBN_EXPORT int gluon_syncbn_release_group(const char* key) {
  return CatchAll([&] { Registry::Get().Release(key); });
}

// Starts or ends the collection of a group's moments, see op/collected_moments.h.
SYNCBN_EXPORT int gluon_syncbn_collect(const char* key, int starts) {
  return CatchAll([&] {
    const auto layer = LayerOf(key);
    starts ? layer->history.collected().Start() : layer->history.collected().End();
  });
}

// Writes the first `size` of the collected numbers; returns how many there are, -1 for an error.
SYNCBN_EXPORT int64_t gluon_syncbn_collected(const char* key, double* numbers, int64_t size) {
  return CatchAll(int64_t{-1}, [&] {
    const std::vector<double> found = LayerOf(key)->history.collected().Numbers();
    const int64_t total = static_cast<int64_t>(found.size());
    std::copy_n(found.begin(), std::min(size, total), numbers);
    return total;
  });
}

// `devices` is "cpu(0) cpu(1)"; an empty text means all devices of the group.
SYNCBN_EXPORT int gluon_syncbn_set_participants(const char* key, const char* devices) {
  return CatchAll([&] {
    LayerOf(key)->group.SetParticipants(syncbn::ParseDevices(devices));
  });
}

// The layer is made to be called by a driver only, see collective/devices/calls.h.
SYNCBN_EXPORT int gluon_syncbn_expect_driver(const char* key) {
  return CatchAll([&] { LayerOf(key)->group.calls().ExpectDriver(); });
}

// The calling thread begins to call, or has called, a driver's function for one of `devices`.
SYNCBN_EXPORT int gluon_syncbn_enter_driver(const char* device, int devices) {
  return CatchAll([&] { syncbn::EnterDriver(syncbn::ParseDevice(device), devices); });
}

SYNCBN_EXPORT int gluon_syncbn_leave_driver(const char* device) {
  return CatchAll([&] { syncbn::LeaveDriver(syncbn::ParseDevice(device)); });
}

// Seconds that devices have waited for others in this layer, summed over devices.
SYNCBN_EXPORT double gluon_syncbn_wait_seconds(const char* key) {
  return CatchAll(0.0, [&] { return LayerOf(key)->group.WaitSeconds(); });
}

// ---- whole steps, see native/steps.py ----------------------------------------------------------

SYNCBN_EXPORT int gluon_syncbn_has_operators() { return syncbn::has_operators; }

// The arguments of a StepCommit, see mxnet/commit.h: `sizes[i]` gradients in each group, and the
// keys of the layers.
struct gluon_syncbn_step {
  void** gradients;
  const int* sizes;
  int num_groups;
  void** running_statistics;
  int num_running_statistics;
  const char** keys;
  int num_keys;
  void* token;
  int64_t* errors_seen;
  int* verdict;
};

// Returns a StepCommit, or null for an error.
SYNCBN_EXPORT void* gluon_syncbn_commit_step(const gluon_syncbn_step* step) {
  return CatchAll(static_cast<void*>(nullptr), [&]() -> void* {
    std::vector<std::shared_ptr<Layer>> layers;
    for (int i = 0; i < step->num_keys; ++i) layers.push_back(LayerOf(step->keys[i]));
    syncbn::Arrays statistics(step->running_statistics,
                              step->running_statistics + step->num_running_statistics);
    return new syncbn::StepCommit(Groups(step->gradients, step->sizes, step->num_groups),
                                  std::move(statistics), step->token, std::move(layers),
                                  {step->errors_seen, step->verdict});
  });
}

// Ends and deletes a StepCommit.
SYNCBN_EXPORT int gluon_syncbn_seal_step(void* step, void** arrays, const int* sizes,
                                         int num_groups) {
  return CatchAll([&] {
    const std::unique_ptr<syncbn::StepCommit> commit(static_cast<syncbn::StepCommit*>(step));
    commit->Seal(Groups(arrays, sizes, num_groups));
  });
}

// 1 if a group's running statistics were updated since its latest whole step; -1 for an error.
SYNCBN_EXPORT int gluon_syncbn_has_open_step(const char* key) {
  return CatchAll(-1, [&] { return LayerOf(key)->history.IsOpen() ? 1 : 0; });
}

// Replaces `mean` and `var` of `device` by those before the group's open step, and returns 1; or
// returns 0 if they are not what the step has left. -1 for an error.
SYNCBN_EXPORT int gluon_syncbn_undo_statistics(const char* key, const char* device, double* mean,
                                               double* var, int64_t channels) {
  return CatchAll(-1, [&] {
    syncbn::Statistics statistics{{mean, mean + channels}, {var, var + channels}};
    if (!LayerOf(key)->history.Undo(syncbn::ParseDevice(device), &statistics)) return 0;
    std::copy(statistics.mean.begin(), statistics.mean.end(), mean);
    std::copy(statistics.var.begin(), statistics.var.end(), var);
    return 1;
  });
}

// Ends a group's open step, which was undone or not.
SYNCBN_EXPORT int gluon_syncbn_end_step(const char* key) {
  return CatchAll([&] { LayerOf(key)->history.EndStep(); });
}

// Takes the layer to warn of, see op/single_value.h; "" for none.
SYNCBN_EXPORT const char* gluon_syncbn_single_value() {
  const std::string* const layer = syncbn::single_value.exchange(nullptr);
  return layer == nullptr ? "" : layer->c_str();
}

// ---- times and failures ------------------------------------------------------------------------

// For MXEnginePushSync: notes when MXNet runs it, in seconds of the monotonic clock.
SYNCBN_EXPORT void gluon_syncbn_note_time(void* /*run_context*/, void* seconds) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  *static_cast<double*>(seconds) = std::chrono::duration<double>(now).count();
}

// For MXEnginePushSync: what is pushed for its dependencies alone.
SYNCBN_EXPORT void gluon_syncbn_do_nothing(void* /*run_context*/, void* /*parameter*/) {}

SYNCBN_EXPORT void gluon_syncbn_set_timeout(double seconds) { syncbn::default_timeout = seconds; }

SYNCBN_EXPORT double gluon_syncbn_timeout() { return syncbn::default_timeout; }

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
    syncbn::NoteRecovery();
    if (syncbn::TheCommunicator() != nullptr) syncbn::TheCommunicator()->Reset();
  });
}

// Of the checkout that was built; empty where the build does not know it.
SYNCBN_EXPORT const char* gluon_syncbn_commit() { return SYNCBN_COMMIT; }

SYNCBN_EXPORT const char* gluon_syncbn_instruction_set() { return syncbn::cpu::InstructionSet(); }

// The architectures that the library has machine code for; empty in a build without CUDA.
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

SYNCBN_EXPORT int gluon_syncbn_keep_freed_memory() { return syncbn::KeepFreedMemory() ? 1 : 0; }

SYNCBN_EXPORT int gluon_syncbn_num_threads() { return syncbn::NumThreads(); }
