// An NDArray that MXNet has handed to a callback, which must free it.
// Who uses it: callbacks.h and custom_op.cc.
#pragma once
#include "mxnet/mxnet_api.h"
#include "op/tensor.h"

namespace syncbn {

class NDArray {
 public:
  explicit NDArray(void* handle) : handle_(handle) {}
  NDArray(NDArray&& other) noexcept : handle_(other.handle_) { other.handle_ = nullptr; }
  NDArray(const NDArray&) = delete;
  NDArray& operator=(const NDArray&) = delete;
  ~NDArray() {
    if (handle_ != nullptr) Mxnet().NDArrayFree(handle_);
  }

  NDArrayHandle Handle() const { return handle_; }
  // Throws Error for a dtype that the layer does not know.
  Tensor View() const;

 private:
  NDArrayHandle handle_;
};

}  // namespace syncbn
