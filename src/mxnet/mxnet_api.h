// MXNet's C functions, which are looked up at run time, so that one binary works with all wheels of
// MXNet. Declarations follow mxnet/c_api.h and dmlc/logging.h of 1.9.1.
#pragma once
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mxnet/native_op.h"
#include "op/backend.h"

namespace dmlc {
// MXNet catches this type by name, so it must have default visibility.
struct __attribute__((visibility("default"))) Error : public std::runtime_error {
  explicit Error(const std::string& text) : std::runtime_error(text) {}
};
}  // namespace dmlc

extern "C" {
struct MXCallbackList {
  int num_callbacks;
  int (**callbacks)(void);
  void** contexts;
};
typedef int (*CustomOpPropCreator)(const char* op_type, const int num_kwargs, const char** keys,
                                   const char** values, struct MXCallbackList* list);
}

namespace syncbn {

typedef void* NDArrayHandle;

// mxnet::Context; dev_type is 1 for a CPU, 2 for a GPU, 3 for pinned memory of the host.
struct MxnetContext {
  int dev_type, dev_id;
};

// Work for MXNet's engine.
typedef void (*EngineWork)(void* run_context, void* parameter);

struct MxnetApi {
  int (*CustomOpRegister)(const char* op_type, CustomOpPropCreator creator);
  int (*NDArrayGetShapeEx64)(NDArrayHandle handle, int* ndim, const int64_t** shape);
  int (*NDArrayGetData)(NDArrayHandle handle, void** data);
  int (*NDArrayGetDType)(NDArrayHandle handle, int* dtype);
  int (*NDArrayGetStorageType)(NDArrayHandle handle, int* type);
  int (*NDArrayCreateEx64)(const int64_t* shape, int ndim, int dev_type, int dev_id,
                           int delay_alloc, int dtype, NDArrayHandle* array);
  int (*ShallowCopyNDArray)(NDArrayHandle handle, NDArrayHandle* array);
  int (*NDArrayFree)(NDArrayHandle handle);
  int (*NDArrayWaitToRead)(NDArrayHandle handle);
  int (*NDArrayWaitAll)();
  int (*EnginePushSyncND)(EngineWork work, void* parameter, void (*deleter)(void* parameter),
                          const MxnetContext* context, NDArrayHandle* read, int num_read,
                          NDArrayHandle* written, int num_written, const int* property,
                          int priority, const char* name);
  const char* (*GetLastError)();
};

// Throws Error if this process has not loaded the library `path`, or if a function is missing.
void LoadMxnetApi(const char* path);
const MxnetApi& Mxnet();

// Throws Error with MXNet's text if `status` is not 0.
void CheckMxnet(int status);

// Registers the operator of custom_op.cc.
void RegisterOperator();

// ---- errors.cc, engine.cc: the operator's access to MXNet's engine ------------------------------

// Owns an NDArray.
class NDArray {
 public:
  explicit NDArray(NDArrayHandle handle) : handle_(handle) {}

  NDArrayHandle Handle() const { return handle_.get(); }

  // The array must be an argument of a running operator, because View does not wait for its data.
  Tensor View() const { return ViewArray(Handle(), true); }

 private:
  struct Free {
    void operator()(NDArrayHandle handle) const { Mxnet().NDArrayFree(handle); }
  };
  std::unique_ptr<void, Free> handle_;
};

// Runs the body of a callback that MXNet calls on the user's thread. Returns 1, MXNet's success. An
// exception becomes a dmlc::Error, from which MXNet makes an MXNetError with the same text.
template <typename Body>
int Callback(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    throw dmlc::Error(error.what());
  }
  return 1;
}

// Makes the operator that has the argument `array` fail with an MXNetError. Blocks until MXNet has
// taken the errors of earlier calls, see errors.cc.
void FailOperator(NDArray array, const std::string& text);

// Enlarges MXNet's list of errors, see errors.cc. Call it once, before the first operator exists.
// Another thread that waits for all of MXNet's work meanwhile may get an error.
void ReserveErrors();

// Runs `body` with the arrays `handles` in a callback for forward or backward. MXNet calls the
// callback on its threads for custom operators. Frees the arrays. Returns 1.
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

// An Allocator as in op/backend.h.
std::shared_ptr<void> AllocateFromMxnet(const Device& device, MemoryKind kind, size_t bytes);

// Blocks until MXNet has no pending work.
void WaitBeforeFork();
// Makes every later fork call WaitBeforeFork.
void GuardForks();

}  // namespace syncbn
