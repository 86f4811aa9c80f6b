// The threads of an emulated block are fibers, which run in turn from barrier to barrier. A fiber
// is reused for the thread with the same index in the next block.
//
// The compiler's setjmp and longjmp switch fibers, because they are fast: swapcontext makes a
// system call each time, and the C library's setjmp and longjmp look for cleanup handlers.
#include <ucontext.h>

#include <memory>
#include <vector>

#include "cuda_runtime.h"

thread_local dim3 threadIdx, blockIdx;

namespace emulated {
namespace {

constexpr size_t kStack = 64 << 10;

using JumpBuffer = void* [5];  // the buffer that __builtin_setjmp fills

struct Fiber {
  JumpBuffer place;
  std::unique_ptr<char[]> stack{new char[kStack]};
  bool done = true;
};

struct Block {
  JumpBuffer scheduler;
  std::vector<Fiber> fibers;
  const std::function<void()>* thread = nullptr;
};

thread_local Block* block = nullptr;  // the block that this operating-system thread runs

// Not inlined, because otherwise the address sanitizer would detect that the jump does not return,
// and would search for the end of the stack at each jump.
[[gnu::noipa, gnu::no_sanitize("address")]] void JumpTo(JumpBuffer place) {
  __builtin_longjmp(place, 1);
}

void Wait() {
  Fiber& fiber = block->fibers[threadIdx.x];
  if (__builtin_setjmp(fiber.place) == 0) JumpTo(block->scheduler);
}

void RunThreads() {
  while (true) {
    block->fibers[threadIdx.x].done = true;
    Wait();
    (*block->thread)();
  }
}

void MakeFibers(unsigned threads) {
  block->fibers = std::vector<Fiber>(threads);
  for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = block->fibers[threadIdx.x].stack.get();
    // Stacks begin at different offsets, because otherwise all use the same few cache sets.
    context.uc_stack.ss_size = kStack - threadIdx.x * 448 % (kStack / 2);
    makecontext(&context, RunThreads, 0);
    if (__builtin_setjmp(block->scheduler) == 0) setcontext(&context);
  }
}

void Resume(unsigned thread) {
  threadIdx.x = thread;
  if (__builtin_setjmp(block->scheduler) == 0) JumpTo(block->fibers[thread].place);
}

void RunBlock(unsigned threads) {
  for (unsigned t = 0; t < threads; ++t) block->fibers[t].done = false;
  for (unsigned waiting = threads; waiting > 0;) {
    waiting = 0;
    for (unsigned t = 0; t < threads; ++t) {
      if (!block->fibers[t].done) Resume(t);
      waiting += !block->fibers[t].done;
    }
  }
}

}  // namespace

void Run(unsigned blocks, unsigned threads, const std::function<void()>& thread) {
  static thread_local Block own;
  block = &own;
  if (own.fibers.size() < threads) MakeFibers(threads);
  block->thread = &thread;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) RunBlock(threads);
}

}  // namespace emulated

void __syncthreads() { emulated::Wait(); }

int __syncthreads_or(int any) {
  static thread_local int result;
  __syncthreads();  // all threads have returned from the previous call
  result = 0;
  __syncthreads();
  result |= any;
  __syncthreads();
  return result;
}
