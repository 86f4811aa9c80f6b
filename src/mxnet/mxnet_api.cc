#include "mxnet/mxnet_api.h"

#include <dlfcn.h>

#include "core/error.h"

namespace syncbn {
namespace {

MxnetApi api;

// `newer` is the name of the function in MXNet 2, if it differs.
template <typename Function>
void Find(void* library, const char* name, Function* function, const char* newer = nullptr) {
  void* found = dlsym(library, name);
  if (found == nullptr && newer != nullptr) found = dlsym(library, newer);
  if (found == nullptr) {
    throw Error(Concat("libmxnet.so must be of MXNet 1.6 to 2.0, got one without ", name));
  }
  *function = reinterpret_cast<Function>(found);
}

}  // namespace

void LoadMxnetApi(const char* path) {
  void* library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    throw Error(Concat("MXNet's library must be loaded in this process, but ", path, " is not"));
  }
  Find(library, "MXCustomOpRegister", &api.CustomOpRegister);
  Find(library, "MXNDArrayGetShapeEx64", &api.NDArrayGetShapeEx64, "MXNDArrayGetShape64");
  Find(library, "MXNDArrayGetData", &api.NDArrayGetData);
  Find(library, "MXNDArrayGetDType", &api.NDArrayGetDType);
  Find(library, "MXNDArrayGetStorageType", &api.NDArrayGetStorageType);
  Find(library, "MXNDArrayCreateEx64", &api.NDArrayCreateEx64, "MXNDArrayCreate64");
  Find(library, "MXShallowCopyNDArray", &api.ShallowCopyNDArray);
  Find(library, "MXNDArrayFree", &api.NDArrayFree);
  Find(library, "MXNDArrayWaitToRead", &api.NDArrayWaitToRead);
  Find(library, "MXNDArrayWaitAll", &api.NDArrayWaitAll);
  Find(library, "MXEnginePushSyncND", &api.EnginePushSyncND);
  Find(library, "MXGetLastError", &api.GetLastError);
}

const MxnetApi& Mxnet() { return api; }

void CheckMxnet(int status) {
  if (status != 0) throw Error(api.GetLastError());
}

}  // namespace syncbn
