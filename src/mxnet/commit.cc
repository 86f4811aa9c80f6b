// The operations around the update of a step. An update must not depend on an error that can be
// read before it, because a read that raises clears the error for all that is still queued; see
// docs/design/steps.md.
#include "mxnet/commit.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "mxnet/callbacks.h"

namespace syncbn {

struct Step {
  std::vector<std::shared_ptr<Layer>> layers;
  StepNumbers numbers;
  bool is_computed = false;  // all gradients, without an error
  std::string error;         // of a dropped step
};

namespace {

// The step of a queued operation.
Step* Get(void* parameter) { return static_cast<std::shared_ptr<Step>*>(parameter)->get(); }

// Skipped if a gradient carries an error.
void NoteComputed(void* /*run_context*/, void* step) { Get(step)->is_computed = true; }

// An error that a read has cleared leaves no trace in the gradients, but operators that have failed
// are counted.
void Decide(void* /*run_context*/, void* parameter) {
  Step* const step = Get(parameter);
  const OperatorErrors errors = GetOperatorErrors();
  const bool has_failed =
      errors.count > std::max(*step->numbers.errors_seen, errors.before_recovery);
  *step->numbers.errors_seen = errors.count;
  if (step->is_computed && !has_failed) {
    for (const auto& layer : step->layers) layer->history.EndStep();
    *step->numbers.verdict = kWhole;
    return;
  }
  step->error = Concat("this training step was dropped, and parameters keep their values: ",
                       has_failed ? errors.latest : "an operator of MXNet's has failed");
  *step->numbers.verdict = kDropped;
  throw dmlc::Error(step->error);
}

void ThrowIfDropped(void* /*run_context*/, void* parameter) {
  const Step* const step = Get(parameter);
  if (!step->error.empty()) throw dmlc::Error(step->error);
}

}  // namespace

StepCommit::StepCommit(std::vector<Arrays> groups, Arrays running_statistics, NDArrayHandle token,
                       std::vector<std::shared_ptr<Layer>> layers, StepNumbers numbers)
    : step_(std::make_shared<Step>()) {
  step_->layers = std::move(layers);
  step_->numbers = numbers;
  Arrays gradients;
  for (const Arrays& group : groups) gradients.insert(gradients.end(), group.begin(), group.end());
  Push(NoteComputed, std::move(gradients), {token}, kCPUPrioritized);
  // Running statistics are written, for MXNet: forward calls of the next step come after it.
  running_statistics.push_back(token);
  Push(Decide, {}, std::move(running_statistics), kNoSkip);
  for (Arrays& group : groups) Push(ThrowIfDropped, {token}, std::move(group), kNoSkip);
}

void StepCommit::Seal(const std::vector<Arrays>& groups) {
  for (const Arrays& group : groups) Push(ThrowIfDropped, {}, group, kNoSkip);
}

void StepCommit::Push(EngineWork work, Arrays read, Arrays written, EngineProperty property) {
  using Shared = std::shared_ptr<Step>;
  const auto release = [](void* step) { delete static_cast<Shared*>(step); };
  CheckMxnet(PushToEngine(work, new Shared(step_), release, std::move(read), std::move(written),
                          property));
}

}  // namespace syncbn
