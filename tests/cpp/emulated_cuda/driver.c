/* Emulates the functions of CUDA's driver that op/cuda/lane.cc calls, as libcuda.so.1. The context
   of a device is its number plus one, and null where the thread has none. Who uses it: the target
   emulated_cuda, and scripts/check_gpu_wheel.py in its stub of libcuda. */
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

static __thread int current = -1;

int cuCtxGetCurrent(void** context) {
  *context = (void*)(intptr_t)(current + 1);
  return 0;
}
int cuCtxSetCurrent(void* context) {
  current = (int)(intptr_t)context - 1;
  return 0;
}
int* emulated_device(void) { return &current; }

#ifdef __cplusplus
}
#endif
