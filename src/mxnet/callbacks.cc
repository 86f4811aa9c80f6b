// An operator's error into MXNet, by way of one of its arrays.
//
// What a custom operator throws MXNet puts into one slot that all of them share without a lock
// (custom-inl.h, `exception_`), and the operator that completes next takes it. That may be a
// healthy one, as it completes in work of its own that is queued behind other work, on a GPU behind
// bulks of tens of milliseconds; and two that complete at once free the same object twice. But
// before it completes an operator MXNet also looks at the variables of the arrays that the callback
// was given, and these are new in each call (custom.cc, AllocateNDArrayCopy). So the error is
// thrown by work of the engine that writes one of them: then nobody else can take it.
#include "mxnet/callbacks.h"

#include <memory>

namespace syncbn {
namespace {

void ThrowText(void* /*run_context*/, void* text) {
  throw dmlc::Error(*static_cast<const std::string*>(text));
}

void DeleteText(void* text) { delete static_cast<std::string*>(text); }

}  // namespace

void FailOperator(NDArrayHandle array, const std::string& text) {
  const MxnetContext cpu{1, 0};
  const int prioritized = 3;  // FnProperty::kCPUPrioritized: behind no operator
  const int status =
      Mxnet().EnginePushSyncND(ThrowText, new std::string(text), DeleteText, &cpu, nullptr, 0,
                               &array, 1, &prioritized, 0, "gluon_syncbn.fail");
  // MXNET_ENGINE_TYPE=NaiveEngine runs the work, and operators, at once in this thread.
  if (status != 0) throw dmlc::Error(text);
}

}  // namespace syncbn
