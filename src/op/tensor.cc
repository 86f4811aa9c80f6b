// Small per-channel vectors to and from double, in which all of a layer's scalars are computed.
#include "op/tensor.h"

#include "core/error.h"

namespace syncbn {
namespace {

template <typename T>
void Write(const std::vector<double>& values, Request request, T* out) {
  for (size_t i = 0; i < values.size(); ++i) {
    out[i] = static_cast<T>(request == Request::kAdd ? out[i] + values[i] : values[i]);
  }
}

}  // namespace

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + ")";
}

void CheckIsParameter(const Tensor& vector) {
  if (vector.dtype != DType::kFloat32 && vector.dtype != DType::kFloat64) {
    throw Error(Concat("parameters and running statistics are float32 or float64, but got ",
                       Name(vector.dtype)));
  }
}

std::vector<double> ReadVector(const Tensor& tensor) {
  CheckIsParameter(tensor);
  const size_t size = static_cast<size_t>(tensor.shape.at(0));
  if (tensor.dtype == DType::kFloat64) {
    const double* data = static_cast<const double*>(tensor.data);
    return std::vector<double>(data, data + size);
  }
  const float* data = static_cast<const float*>(tensor.data);
  return std::vector<double>(data, data + size);
}

void WriteVector(const std::vector<double>& values, Request request, const Tensor& tensor) {
  if (request == Request::kNull) return;
  CheckIsParameter(tensor);
  if (tensor.dtype == DType::kFloat64) {
    Write(values, request, static_cast<double*>(tensor.data));
  } else {
    Write(values, request, static_cast<float*>(tensor.data));
  }
}

}  // namespace syncbn
