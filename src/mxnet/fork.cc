// MXNet's own fork handler (initialize.cc, atfork_prepare) first joins the threads of custom
// operators and stops the engine then. An operator that becomes ready in between has no thread to
// run on, and the process hangs or aborts. Handlers run in the reverse order of registration, so
// this one runs first, and MXNet is idle afterwards. DataLoader workers and, before
// Python 3.10, subprocess fork.
//
// os.fork() calls such handlers with the GIL, when no thread can queue what an operator waits for.
// So Python calls WaitBeforeFork before them, without the GIL (library.py), and the handler remains
// for forks that Python does not see.
#include "mxnet/fork.h"

#include <pthread.h>

#include <cstdio>

#include "core/program.h"
#include "mxnet/mxnet_api.h"

namespace syncbn {

void WaitBeforeFork() {
  // Waiting drops the errors that arrays carry, and these then read without one. A failed layer
  // keeps its own, so its next step raises it; those of other operators are only printed.
  if (Mxnet().NDArrayWaitAll() != 0) {
    std::fprintf(stderr, "gluon_syncbn: error of the work in flight before a fork: %s\n",
                 Mxnet().GetLastError());
  }
}

void ArmForkGuard() {
  const auto prepare = [] {
    BeginFork();
    WaitBeforeFork();
  };
  pthread_atfork(prepare, EndFork, EndFork);
}

}  // namespace syncbn
