// A pool of threads that all operators of the process share.
#pragma once
#include <cstdint>
#include <functional>

namespace syncbn {

// Calls task(i) once for every i in [0, tasks), on the calling thread and on idle threads of the
// pool, and returns when all tasks are done. Tasks must not throw or depend on each other.
void ParallelFor(int64_t tasks, const std::function<void(int64_t)>& task);

// Returns the number of threads that may run tasks at once, including the caller: OMP_NUM_THREADS
// or, by default, this process's processors. Returns 1 in a child forked after the pool's start.
int NumThreads();

}  // namespace syncbn
