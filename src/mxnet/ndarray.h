// An NDArray that MXNet has handed to a callback, which must free it.
#pragma once
#include <memory>

#include "core/error.h"
#include "mxnet/mxnet_api.h"
#include "op/tensor.h"

namespace syncbn {

class NDArray {
 public:
  explicit NDArray(NDArrayHandle handle) : handle_(handle) {}

  NDArrayHandle Handle() const { return handle_.get(); }

  // Its pointer, shape and dtype. Nothing here waits: the engine has the data ready.
  // Throws Error for a dtype that the layer does not know.
  Tensor View() const {
    Tensor tensor;
    int ndim = 0, dtype = 0;
    const int64_t* shape = nullptr;
    CheckMxnet(Mxnet().NDArrayGetShapeEx64(Handle(), &ndim, &shape));
    tensor.shape.assign(shape, shape + ndim);
    CheckMxnet(Mxnet().NDArrayGetData(Handle(), &tensor.data));
    CheckMxnet(Mxnet().NDArrayGetDType(Handle(), &dtype));
    if (!IsSupported(dtype)) {
      throw Error(Concat("data is float16, float32 or float64, but got ", NameOfFlag(dtype)));
    }
    tensor.dtype = static_cast<DType>(dtype);
    return tensor;
  }

 private:
  struct Free {
    void operator()(NDArrayHandle handle) const { Mxnet().NDArrayFree(handle); }
  };
  std::unique_ptr<void, Free> handle_;
};

}  // namespace syncbn
