// The native operator `_gluon_syncbn`, a copy of MXNet's operator `Custom` that gets arrays in
// oneDNN's layouts. docs/design/native_operator.md explains it.
//
// native_op.cc is compiled with the old std::string, other files with the new one. So no
// std::string may pass through this header, and it may not include a header that has one in a type.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/tensor.h"

namespace syncbn {

// A call of the operator by MXNet's engine.
struct NativeCall {
  virtual ~NativeCall() = default;
  // Ends the operator for MXNet, which may then delete it. `error` is null or the error's text.
  virtual void Complete(const char* error) = 0;

  void* op = nullptr;  // the Operator of custom_op.cc
  bool is_forward = false, is_training = false;
  std::vector<Tensor> inputs;   // as in Custom; backward has only dy, and x or y
  std::vector<Tensor> outputs;  // y; or dx, dgamma, dbeta
  std::vector<int> requests;    // an OpReqType of MXNet for each output
};

// ---- native_op.cc

// Registers the operator with nnvm. Returns "", or the reason why it cannot be used. Call it
// before any operator runs, because nnvm's registry has no lock.
const char* RegisterNativeOperator(const char* libmxnet_path);
// Returns how many calls have read or written an array with blocks of channels.
int64_t CountBlockedCalls();

// ---- custom_op.cc

// Runs the call, without blocking the engine's worker for longer than a device usually waits.
void RunNative(std::shared_ptr<NativeCall> call);
// Returns true if arrays with `ndim` dimensions, at least 3, may have blocks of channels.
bool TakesBlocks(void* op, int ndim);
// Returns a row-major array; without its address if not `with_data`.
Tensor ViewArray(void* array, bool with_data);
bool IsDense(void* array);
// Returns an array of a CPU, which FreeArray deletes.
void* NewArray(const Tensor& like);
// Returns another handle of the same array.
void* CopyHandle(void* array);
void FreeArray(void* array);

}  // namespace syncbn
