// The operator's access to MXNet's engine: arrays, errors, memory, and the wait before a fork.
#pragma once
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "mxnet/mxnet_api.h"
#include "op/backend.h"

namespace syncbn {

// An NDArray that MXNet has passed to a callback, which must free it.
class NDArray {
 public:
  explicit NDArray(NDArrayHandle handle) : handle_(handle) {}

  NDArrayHandle Handle() const { return handle_.get(); }

  // The array's pointer, shape and dtype. Nothing here waits: the engine has the data ready.
  // InferType has checked the dtype.
  Tensor View() const {
    Tensor tensor;
    int ndim = 0, dtype = 0;
    const int64_t* shape = nullptr;
    CheckMxnet(Mxnet().NDArrayGetShapeEx64(Handle(), &ndim, &shape));
    tensor.shape.assign(shape, shape + ndim);
    CheckMxnet(Mxnet().NDArrayGetData(Handle(), &tensor.data));
    CheckMxnet(Mxnet().NDArrayGetDType(Handle(), &dtype));
    tensor.dtype = static_cast<DType>(dtype);
    return tensor;
  }

 private:
  struct Free {
    void operator()(NDArrayHandle handle) const { Mxnet().NDArrayFree(handle); }
  };
  std::unique_ptr<void, Free> handle_;
};

// Runs the body of a callback that MXNet calls on the user's thread, and returns MXNet's 1 for
// success. Any exception becomes a dmlc::Error, which the user sees as an MXNetError with the same
// text.
template <typename Body>
int Callback(const Body& body) {
  std::string text;
  try {
    body();
    return 1;
  } catch (const std::exception& error) {
    text = error.what();
  }
  throw dmlc::Error(text);
}

// Completes an operator with an MXNetError of this text; `array` belongs to its call. Blocks until
// earlier failed operators have taken their errors.
void FailOperator(NDArray array, const std::string& text);

// Must be called once, before the first operator is created.
void ReserveErrors();

// Like Callback, for callbacks that MXNet runs later, on its threads for custom operators.
// `handles` are the arrays of the call; the body receives them.
template <typename Body>
int OperatorCallback(int size, void** handles, const Body& body) {
  std::vector<NDArray> arrays(handles, handles + size);
  try {
    body(arrays);
  } catch (const std::exception& error) {
    FailOperator(std::move(arrays[0]), error.what());
  }
  return 1;
}

// An Allocator that uses MXNet's pools.
std::shared_ptr<void> AllocateFromMxnet(const Device& device, MemoryKind kind, size_t bytes);

// Blocks until MXNet is idle.
void WaitBeforeFork();
// Makes every later fork() call WaitBeforeFork.
void GuardForks();

}  // namespace syncbn
