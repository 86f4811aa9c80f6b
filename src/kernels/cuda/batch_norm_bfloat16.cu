// The kernels for bfloat16 data.
#include "kernels/cuda/batch_norm.cuh"

template struct syncbn::cuda::BatchNorm<syncbn::cuda::Bfloat16>;
