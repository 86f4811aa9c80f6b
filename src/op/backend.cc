// Tensors in host memory, and the choice of a backend.
#include "op/backend.h"

#include <type_traits>

#include "core/error.h"

namespace syncbn {
namespace {

// Returns use(the numbers of the vector).
template <typename Use>
auto WithNumbers(const Tensor& vector, const Use& use) {
  CheckIsParameter(vector);
  if (vector.dtype == DType::kFloat64) return use(static_cast<double*>(vector.data));
  return use(static_cast<float*>(vector.data));
}

}  // namespace

void CheckIsParameter(const Tensor& vector) {
  if (vector.dtype != DType::kFloat32 && vector.dtype != DType::kFloat64) {
    throw DeviceError(Concat("parameters and running statistics must be float32 or float64, got ",
                             Name(vector.dtype)));
  }
}

std::vector<double> ReadVector(const Tensor& vector) {
  return WithNumbers(vector, [&](const auto* from) {
    return std::vector<double>(from, from + vector.shape.at(0));
  });
}

void WriteVector(const std::vector<double>& values, WriteMode mode, const Tensor& vector) {
  if (mode == WriteMode::kNull) return;
  WithNumbers(vector, [&](auto* to) {
    for (const double value : values) {
      *to = static_cast<std::decay_t<decltype(*to)>>(mode == WriteMode::kAdd ? *to + value : value);
      ++to;
    }
  });
}

std::unique_ptr<Backend> MakeBackend(const Device& device, Allocator allocator) {
  if (device.type != "gpu") return MakeCpuBackend();
#if defined(SYNCBN_CUDA)
  return MakeCudaBackend(device, allocator);
#else
  (void)allocator;
  throw Error(Concat("SyncBatchNorm on ", device.Name(), ": this build of gluon_syncbn has CPU ",
                     "kernels only, because " SYNCBN_CUDA_MISSING "; install a working nvcc, ",
                     "which comes with the CUDA toolkit, and build it again with ",
                     "`GLUON_SYNCBN_CUDA=1 pip install .`"));
#endif
}

}  // namespace syncbn
