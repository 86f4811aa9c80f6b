// Shares the processor among all operators of the process that compute at the same time. It must
// not know what is computed.
//
// One pool of threads serves every caller, so that several contexts in one process neither start
// a team of threads each nor starve one another: idle threads help whichever job still has tasks.
#pragma once
#include <cstdint>
#include <functional>

namespace syncbn {

// Calls task(i) once for every i in [0, tasks), on the calling thread and on idle threads of the
// pool; returns when all are done. Tasks must not throw, and must not depend on each other.
void ParallelFor(int64_t tasks, const std::function<void(int64_t)>& task);

// Threads that compute at once, the caller included: OMP_NUM_THREADS where it is set, else the
// processors that this process may run on.
int NumThreads();

}  // namespace syncbn
