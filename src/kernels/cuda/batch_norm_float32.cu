// The kernels for float32 data.
#include "kernels/cuda/batch_norm.cuh"

template struct syncbn::cuda::BatchNorm<float>;
