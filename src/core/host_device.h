// Marks functions that CUDA kernels call as well as the host.
#pragma once

#if defined(__CUDACC__)
#define SYNCBN_HOST_DEVICE __host__ __device__
#else
#define SYNCBN_HOST_DEVICE
#endif
