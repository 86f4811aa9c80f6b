// An NDArray that MXNet has handed to a callback, which must free it.
// Who uses it: callbacks.h and custom_op.cc.
#pragma once
#include <memory>

#include "mxnet/mxnet_api.h"
#include "op/tensor.h"

namespace syncbn {

class NDArray {
 public:
  explicit NDArray(NDArrayHandle handle) : handle_(handle) {}

  NDArrayHandle Handle() const { return handle_.get(); }
  // Throws Error for a dtype that the layer does not know.
  Tensor View() const;

 private:
  struct Free {
    void operator()(NDArrayHandle handle) const { Mxnet().NDArrayFree(handle); }
  };
  std::unique_ptr<void, Free> handle_;
};

}  // namespace syncbn
