// MXNet's C functions that this library calls, found at run time in the libmxnet.so that Python has
// loaded. The build needs no headers of MXNet, so one binary serves `mxnet`, `mxnet-cu110` and
// `mxnet-cu112`. The declarations follow mxnet/c_api.h and dmlc/logging.h of 1.9.1; mxnet_api.cc
// has the names in MXNet 2.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

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

// mxnet::Context; dev_type is 1 for a CPU, 2 for a GPU, 3 for pinned memory of the CPU.
struct MxnetContext {
  int dev_type, dev_id;
};

// A function for MXNet's engine to run.
typedef void (*EngineWork)(void* run_context, void* parameter);

// Values of MXNet's FnProperty.
enum EngineProperty {
  kCPUPrioritized = 3,  // does not queue behind operators; skipped while an array has an error
  kNoSkip = 7           // runs even if an array has an error
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

// Throws syncbn::Error if this process has not loaded `path`, or if a function is missing.
void LoadMxnetApi(const char* path);
const MxnetApi& Mxnet();

// Throws syncbn::Error with MXNet's text unless `status` is 0.
void CheckMxnet(int status);

// Queues `work` on the CPU, which writes `array`; the engine then calls `deleter` unless it is
// null. Returns MXNet's status.
int PushToEngine(EngineWork work, void* parameter, void (*deleter)(void* parameter),
                 NDArrayHandle array, EngineProperty property);

// Registers the operator of custom_op.cc. Throws syncbn::Error if MXNet refuses.
void RegisterOperator();

}  // namespace syncbn
