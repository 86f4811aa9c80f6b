// Reads pointer, shape and dtype of an NDArray. Nothing here waits: the engine has the data ready.
#include "mxnet/ndarray.h"

#include "core/error.h"

namespace syncbn {
namespace {

void Check(int status) {
  if (status != 0) throw Error(Mxnet().GetLastError());
}

}  // namespace

Tensor NDArray::View() const {
  Tensor tensor;
  int ndim = 0, dtype = 0;
  const int64_t* shape = nullptr;
  Check(Mxnet().NDArrayGetShapeEx64(handle_, &ndim, &shape));
  tensor.shape.assign(shape, shape + ndim);
  Check(Mxnet().NDArrayGetData(handle_, &tensor.data));
  Check(Mxnet().NDArrayGetDType(handle_, &dtype));
  if (!IsSupported(dtype)) {
    throw Error(Concat("data is float16, float32 or float64, but got ", NameOfFlag(dtype)));
  }
  tensor.dtype = static_cast<DType>(dtype);
  return tensor;
}

}  // namespace syncbn
