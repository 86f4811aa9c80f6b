// The threads of an emulated block: a fiber each, run in turn until all wait for the same thing.
//
// A fiber is made once and then runs the same thread of one block after another. Fibers are
// switched by the compiler's own setjmp and longjmp: swapcontext makes a system call each time,
// the library's functions look for cleanups, and blocks switch very often.
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cuda_runtime.h"

thread_local dim3 threadIdx, blockIdx, gridDim;

namespace emulated {
namespace {

constexpr size_t kStack = 64 << 10;
constexpr unsigned kWarp = 32;

enum class State { kReady, kAtBarrier, kInShuffle, kDone };

using Place = void*[5];  // where something waits

struct Fiber {
  Place place;
  std::unique_ptr<char[]> stack{new char[kStack]};
  State state = State::kDone;
  // Two, because a partner may be in the next shuffle before this one has read.
  uint64_t given[2] = {};
  unsigned shuffles = 0;
};

struct Block {
  Place scheduler;
  std::vector<Fiber> fibers;
  const std::function<void()>* thread = nullptr;
};

thread_local Block* block = nullptr;  // the one that this thread runs

// Not in the function that waits at the place. If the address sanitizer knew that it does not
// return, it would look for the end of the stack that is left, each time.
[[gnu::noipa, gnu::no_sanitize("address")]] void JumpTo(Place place) {
  __builtin_longjmp(place, 1);
}

void Wait(State state) {
  Fiber& fiber = block->fibers[threadIdx.x];
  fiber.state = state;
  if (__builtin_setjmp(fiber.place) == 0) JumpTo(block->scheduler);
}

void RunThreads() {
  while (true) {
    Wait(State::kDone);
    (*block->thread)();
  }
}

void MakeFibers(unsigned threads) {
  block->fibers = std::vector<Fiber>(threads);
  for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = block->fibers[threadIdx.x].stack.get();
    // Stacks begin at different places of their memory, or few lines of a cache hold them all.
    context.uc_stack.ss_size = kStack - threadIdx.x * 448 % (kStack / 2);
    makecontext(&context, RunThreads, 0);
    if (__builtin_setjmp(block->scheduler) == 0) setcontext(&context);
  }
}

void Resume(unsigned thread) {
  threadIdx.x = thread;
  if (__builtin_setjmp(block->scheduler) == 0) JumpTo(block->fibers[thread].place);
}

// Makes fibers [begin, end) ready if all that are not done wait in `state`.
bool Release(unsigned begin, unsigned end, State state) {
  bool any = false;
  for (unsigned t = begin; t < end; ++t) {
    if (block->fibers[t].state == State::kDone) continue;
    if (block->fibers[t].state != state) return false;
    any = true;
  }
  for (unsigned t = begin; t < end; ++t) {
    if (block->fibers[t].state != State::kDone) block->fibers[t].state = State::kReady;
  }
  return any;
}

void RunBlock(unsigned threads) {
  for (unsigned t = 0; t < threads; ++t) {
    block->fibers[t].state = State::kReady;
    block->fibers[t].shuffles = 0;
  }
  for (unsigned left = threads; left > 0;) {
    left = 0;
    bool moved = false;
    for (unsigned t = 0; t < threads; ++t) {
      if (block->fibers[t].state == State::kReady) {
        Resume(t);
        moved = true;
      }
      left += block->fibers[t].state != State::kDone;
    }
    for (unsigned t = 0; t < threads; t += kWarp) moved |= Release(t, t + kWarp, State::kInShuffle);
    moved |= Release(0, threads, State::kAtBarrier);
    if (left > 0 && !moved) {
      std::fprintf(stderr, "emulated block %u: its threads wait for different things\n", blockIdx.x);
      std::abort();
    }
  }
}

}  // namespace

uint64_t Exchange(uint64_t bits, int offset) {
  Fiber& fiber = block->fibers[threadIdx.x];
  const unsigned turn = fiber.shuffles++ % 2;
  fiber.given[turn] = bits;
  Wait(State::kInShuffle);
  const Fiber& partner = block->fibers[threadIdx.x ^ static_cast<unsigned>(offset)];
  if (partner.shuffles < fiber.shuffles) {
    std::fprintf(stderr, "emulated shuffle: thread %u has no partner\n", threadIdx.x);
    std::abort();
  }
  return partner.given[turn];
}

void Run(unsigned blocks, unsigned threads, const std::function<void()>& thread) {
  static thread_local Block own;
  block = &own;
  if (own.fibers.size() < threads) MakeFibers(threads);
  block->thread = &thread;
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) RunBlock(threads);
}

}  // namespace emulated

void __syncthreads() { emulated::Wait(emulated::State::kAtBarrier); }

int __syncthreads_or(int any) {
  static thread_local int result;
  __syncthreads();  // all have returned from the previous call
  result = 0;
  __syncthreads();
  result |= any;
  __syncthreads();
  return result;
}
