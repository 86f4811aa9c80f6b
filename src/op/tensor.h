// Memory that an operator reads or writes, as a framework hands it over. It owns nothing.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "kernels/passes.h"

namespace syncbn {

struct Tensor {
  void* data = nullptr;
  std::vector<int64_t> shape;
  DType dtype = DType::kFloat32;
};

std::string ShapeText(const std::vector<int64_t>& shape);  // "(8, 64, 60, 60)"

// Per-channel parameters, statistics and their gradients: float32 or float64, or DeviceError.
void CheckIsParameter(const Tensor& vector);
// In host memory.
std::vector<double> ReadVector(const Tensor& vector);
void WriteVector(const std::vector<double>& values, WriteMode mode, const Tensor& vector);

}  // namespace syncbn
