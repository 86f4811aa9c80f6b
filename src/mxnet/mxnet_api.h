// The functions of MXNet's C interface that the operator calls, looked up at run time in the
// libmxnet.so that Python has loaded. The build needs no headers of MXNet, so one binary serves
// `mxnet`, `mxnet-cu110` and `mxnet-cu112`. The declarations follow mxnet/c_api.h and
// dmlc/logging.h of release 1.9.1, the last release.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace dmlc {
// MXNet catches this type by its name, so the symbol must be visible.
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
using Arrays = std::vector<NDArrayHandle>;

// mxnet::Context; the type 1 is a CPU, 2 a GPU, 3 pinned memory of the CPU.
struct MxnetContext {
  int dev_type, dev_id;
};

// A function that MXNet's engine runs among its own operations.
typedef void (*EngineWork)(void* run_context, void* parameter);

// MXNet's FnProperty.
enum EngineProperty {
  kCPUPrioritized = 3,  // does not queue behind operators; skipped while an array has an error
  kNoSkip = 7
};

struct MxnetApi {
  int (*CustomOpRegister)(const char* op_type, CustomOpPropCreator creator);
  int (*NDArrayGetShapeEx64)(NDArrayHandle handle, int* ndim, const int64_t** shape);
  int (*NDArrayGetData)(NDArrayHandle handle, void** data);
  int (*NDArrayGetDType)(NDArrayHandle handle, int* dtype);
  int (*NDArrayCreateEx64)(const int64_t* shape, int ndim, int dev_type, int dev_id,
                           int delay_alloc, int dtype, NDArrayHandle* array);
  int (*NDArrayFree)(NDArrayHandle handle);
  int (*NDArrayWaitToRead)(NDArrayHandle handle);
  int (*NDArrayWaitAll)();
  int (*EnginePushSyncND)(EngineWork work, void* parameter, void (*deleter)(void* parameter),
                          const MxnetContext* context, NDArrayHandle* read, int num_read,
                          NDArrayHandle* written, int num_written, const int* property,
                          int priority, const char* name);
  const char* (*GetLastError)();
};

// Throws Error if this process has not loaded `path`, or if a function is missing.
void LoadMxnetApi(const char* path);
const MxnetApi& Mxnet();

// Throws Error with MXNet's text if the status of a function is a failure.
void CheckMxnet(int status);

// Queues work of the engine on a CPU, and then `deleter` unless it is null. Returns MXNet's status.
int PushToEngine(EngineWork work, void* parameter, void (*deleter)(void* parameter), Arrays read,
                 Arrays written, EngineProperty property);

// Registers the operator of custom_op.cc. Throws Error if MXNet refuses.
void RegisterOperator();

}  // namespace syncbn
