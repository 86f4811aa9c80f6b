// Waits for MXNet before a process forks. DataLoader workers fork, and so does subprocess before
// Python 3.10.
//
// MXNet's own fork handler (initialize.cc, atfork_prepare) first joins the threads of custom
// operators, and then stops the engine. An operator that becomes ready in between has no thread to
// run on, and the process hangs or aborts. Handlers run in the reverse order of registration, so
// this handler runs first, and MXNet is idle afterwards.
//
// os.fork() calls handlers with the GIL, when no thread can queue the work that an operator waits
// for. So Python first calls WaitBeforeFork without the GIL, and the handler
// remains for forks that Python does not see.
#include <pthread.h>

#include <cstdio>

#include "core/program.h"
#include "mxnet/engine.h"

namespace syncbn {

void WaitBeforeFork() {
  // WaitAll clears pending array errors, so later reads do not raise them. A failed layer keeps its
  // own error, and its next step raises it; errors of other operators are only printed.
  if (Mxnet().NDArrayWaitAll() != 0) {
    std::fprintf(stderr, "gluon_syncbn: error of pending work before a fork: %s\n",
                 Mxnet().GetLastError());
  }
}

void GuardForks() {
  const auto prepare = [] {
    BeginFork();
    WaitBeforeFork();
  };
  pthread_atfork(prepare, EndFork, EndFork);
}

}  // namespace syncbn
