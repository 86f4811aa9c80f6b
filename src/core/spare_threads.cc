#include "core/spare_threads.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace syncbn {
namespace {

struct Spare {
  std::condition_variable wake;
  std::function<void()> work;
};

struct Pool {
  std::mutex mutex;
  std::vector<Spare*> idle;  // the last one has slept for the shortest time
};

// A forked child has none of the threads, so it begins with another pool. Pools are never
// destroyed, because detached threads sleep in them until the process ends.
std::atomic<Pool*> current{new Pool};
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { current = new Pool; });

void Serve(Pool* pool, Spare* self) {
  std::unique_lock<std::mutex> lock(pool->mutex);
  while (true) {
    self->wake.wait(lock, [&] { return self->work != nullptr; });
    auto work = std::exchange(self->work, nullptr);
    lock.unlock();
    work();
    work = nullptr;  // frees what the work owns
    lock.lock();
    pool->idle.push_back(self);
  }
}

void Start(Pool* pool, Spare* spare) {
  sigset_t all, before;  // only the program's threads handle signals
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread(Serve, pool, spare).detach();
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void RunInSpareThread(std::function<void()> work) {
  Pool* const pool = current;
  std::lock_guard<std::mutex> lock(pool->mutex);
  Spare* spare = pool->idle.empty() ? nullptr : pool->idle.back();
  if (spare == nullptr) {
    auto made = std::make_unique<Spare>();
    Start(pool, made.get());
    spare = made.release();
  } else {
    pool->idle.pop_back();
  }
  spare->work = std::move(work);
  spare->wake.notify_one();
}

}  // namespace syncbn
