// The kernels for float16 data.
#include "kernels/cuda/batch_norm.cuh"

template struct syncbn::cuda::BatchNorm<__half>;
