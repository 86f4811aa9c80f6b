// The operations between the gradients of a step and its update.
//
// MXNet's engine shares the pointer to an error among all operations that depend on the failed one,
// and skips them. A read that raises sets the shared pointer to null (threaded_engine.cc,
// ThrowException), and what is still queued then runs, on memory that skipped operations have never
// written. So an update must not depend on an error that somebody can read before it: each
// parameter's gradients get an error of their own here. (Reading one parameter then clears the error
// of operations that are past.)
#include "mxnet/commit.h"

#include <utility>

#include "core/error.h"
#include "mxnet/callbacks.h"

namespace syncbn {
namespace {

struct Step {
  std::vector<std::shared_ptr<RunningHistory>> layers;
  int* verdict;
  bool is_computed = false;  // all gradients, without an error
  std::string error;         // of a dropped step
};

using Shared = std::shared_ptr<Step>;

Step* Get(void* parameter) { return static_cast<Shared*>(parameter)->get(); }

void Release(void* parameter) { delete static_cast<Shared*>(parameter); }

// Skipped if a gradient carries an error.
void NoteComputed(void* /*run_context*/, void* step) { Get(step)->is_computed = true; }

// An error that a read has cleared leaves no trace in the gradients, but that an operator has failed
// is known until recover().
void Decide(void* /*run_context*/, void* parameter) {
  Step* const step = Get(parameter);
  std::string reason = FirstOperatorError();
  if (reason.empty() && !step->is_computed) reason = "an operator of MXNet's has failed";
  if (reason.empty()) {
    for (const auto& layer : step->layers) layer->Commit();
    *step->verdict = kWhole;
    return;
  }
  step->error = Concat("this training step was dropped, and parameters keep their values: ", reason);
  *step->verdict = kDropped;
  throw dmlc::Error(step->error);
}

void SkipUpdateIfDropped(void* /*run_context*/, void* parameter) {
  const Step* const step = Get(parameter);
  if (!step->error.empty()) throw dmlc::Error(step->error);
}

void Push(EngineWork work, const Shared& step, std::vector<NDArrayHandle> read,
          std::vector<NDArrayHandle> written, EngineProperty property) {
  const MxnetContext cpu{1, 0};
  const int number = property;
  if (Mxnet().EnginePushSyncND(work, new Shared(step), Release, &cpu, read.data(),
                               static_cast<int>(read.size()), written.data(),
                               static_cast<int>(written.size()), &number, 0,
                               "gluon_syncbn.commit") != 0) {
    throw Error(Mxnet().GetLastError());
  }
}

}  // namespace

void CommitStep(const StepArrays& arrays, std::vector<std::shared_ptr<RunningHistory>> layers,
                int* verdict) {
  const Shared step = std::make_shared<Step>();
  step->layers = std::move(layers);
  step->verdict = verdict;
  std::vector<NDArrayHandle> all;
  for (const auto& devices : arrays.gradients) all.insert(all.end(), devices.begin(), devices.end());
  Push(NoteComputed, step, all, {arrays.token}, kCPUPrioritized);
  // Running statistics are written, for MXNet: forward calls of the next step come after it.
  std::vector<NDArrayHandle> written = arrays.running_statistics;
  written.push_back(arrays.token);
  Push(Decide, step, {}, std::move(written), kNoSkip);
  for (const auto& devices : arrays.gradients) {
    Push(SkipUpdateIfDropped, step, {arrays.token}, devices, kNoSkip);
  }
}

}  // namespace syncbn
