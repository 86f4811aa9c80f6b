// The kernels for float64 data.
#include "kernels/cuda/batch_norm.cuh"

template struct syncbn::cuda::BatchNorm<double>;
