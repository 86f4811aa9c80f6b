// Emulates the part of CUDA that the kernels need to run as C++ on a CPU, so that tests without a
// GPU check their logic: thread indices, barriers, shared memory, and a runtime whose device memory
// is the host's. It models neither speed nor memory ordering: compute-sanitizer finds races between
// blocks on a GPU.
//
// The threads of a block are fibers of the calling thread (fibers.cc) and run until they wait.
// Blocks run one after the other, so `__shared__` is a static variable of the calling thread.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#define EMULATED_CUDA
#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct uint4 {
  unsigned x, y, z, w;
};

extern thread_local dim3 threadIdx, blockIdx, gridDim;

void __syncthreads();
int __syncthreads_or(int any);
inline void __threadfence() {}

namespace emulated {

constexpr int kMultiprocessors = 3;

// Runs `thread` for every thread of every block.
void Run(unsigned blocks, unsigned threads, const std::function<void()>& thread);

}  // namespace emulated

// ---- the runtime, runtime.cc -------------------------------------------------------------------

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation };
enum cudaMemcpyKind { cudaMemcpyDefault };
enum {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrL2CacheSize,
  cudaStreamNonBlocking,
  cudaHostAllocMapped
};
struct cudaDeviceProp {
  char name[256];
};
typedef struct CUevent_st* cudaEvent_t;
typedef struct CUstream_st* cudaStream_t;

namespace emulated {

// Counts a call of this thread, and returns its status.
cudaError_t Call();
// Makes the call after the next `calls` calls of this thread fail; a negative number disables it.
void FailAfter(int calls);
// The thread's current device, which CurrentDevice sets and restores.
int& Device();
// Aborts unless the stream is null or a stream of the thread's current device.
void CheckStream(cudaStream_t stream);
// The number of allocations of device and pinned memory by all threads.
int Allocations();

}  // namespace emulated

const char* cudaGetErrorString(cudaError_t status);
const char* cudaGetErrorName(cudaError_t status);
cudaError_t cudaGetLastError();
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int device);
cudaError_t cudaMalloc(void** memory, size_t bytes);
cudaError_t cudaMallocManaged(void** memory, size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end);

// ---- what kernels call -------------------------------------------------------------------------

inline unsigned atomicAdd(unsigned* address, unsigned value) {
  const unsigned old = *address;
  *address += value;
  return old;
}

template <typename T>
T __ldcg(const T* address) {
  return *address;
}
