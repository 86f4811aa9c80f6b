// Reads pointer, shape and dtype of an NDArray. Nothing here waits: the engine has the data ready.
#include "mxnet/ndarray.h"

#include "core/error.h"

namespace syncbn {

Tensor NDArray::View() const {
  Tensor tensor;
  int ndim = 0, dtype = 0;
  const int64_t* shape = nullptr;
  CheckMxnet(Mxnet().NDArrayGetShapeEx64(handle_, &ndim, &shape));
  tensor.shape.assign(shape, shape + ndim);
  CheckMxnet(Mxnet().NDArrayGetData(handle_, &tensor.data));
  CheckMxnet(Mxnet().NDArrayGetDType(handle_, &dtype));
  if (!IsSupported(dtype)) {
    throw Error(Concat("data is float16, float32 or float64, but got ", NameOfFlag(dtype)));
  }
  tensor.dtype = static_cast<DType>(dtype);
  return tensor;
}

}  // namespace syncbn
