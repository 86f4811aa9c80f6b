// Jobs are on their callers' stacks, in one list under one mutex. The pool must outlive every
// caller, so nothing here is destroyed.
#include "core/parallel_for.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace syncbn {
namespace {

// A worker picks another job after this many tasks, so that concurrent callers take turns.
constexpr int kTasksPerTurn = 4;

// The last helper usually finishes within one task: spinning for this many rounds is cheaper than
// sleeping and waking up.
constexpr int kSpins = 4000;

struct Job {
  const std::function<void(int64_t)>* task;
  int64_t tasks;
  std::atomic<int64_t> next{0};
  std::atomic<int> helpers{0};  // raised under the mutex, and only while the job is in the list

  // Runs up to `turn` tasks. A task that throws ends the process, because other threads use the
  // job.
  void Run(int64_t turn) noexcept {
    for (; turn > 0; --turn) {
      const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= tasks) return;
      (*task)(i);
    }
  }
  bool HasTasks() const { return next.load(std::memory_order_relaxed) < tasks; }
  int Helpers() const { return helpers.load(std::memory_order_relaxed); }
};

int CountThreads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const long number = std::strtol(text, nullptr, 10);
    if (number > 0) return static_cast<int>(std::min(number, 1024L));
  }
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return CPU_COUNT(&allowed);
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Pool {
 public:
  void Run(Job* job) {
    std::call_once(start_, [this] { Start(); });
    Add(job);
    job->Run(job->tasks);
    Remove(job);
    for (int i = 0; i < kSpins; ++i) {
      if (job->helpers.load(std::memory_order_acquire) == 0) return;
      Pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return job->helpers.load(std::memory_order_acquire) == 0; });
  }

 private:
  void Start() {
    // Only the program's threads handle signals.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int i = 1; i < NumThreads(); ++i) std::thread([this] { Work(); }).detach();
    } catch (const std::system_error&) {
      // The system has no more threads: the callers and the running threads do the work.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void Add(Job* job) {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(job);
    ++callers_;
    const int64_t idle = std::min<int64_t>(NumThreads() - callers_ - helping_, job->tasks - 1);
    for (int64_t i = 0; i < idle; ++i) wake_.notify_one();
  }

  void Remove(Job* job) {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), job));
    --callers_;
    if (!jobs_.empty()) wake_.notify_one();  // this caller's processor can help another job
  }

  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = Pick();
      if (job == nullptr) {
        wake_.wait(lock);
        continue;
      }
      ++helping_;
      job->helpers.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      job->Run(kTasksPerTurn);
      lock.lock();
      --helping_;
      // The job may not exist after this line: its caller reads the number without the mutex.
      if (job->helpers.fetch_sub(1, std::memory_order_release) == 1) finished_.notify_all();
    }
  }

  // Returns the job with the fewest helpers; among equal jobs, the job that was helped longest ago.
  // Returns null while callers and workers already occupy all processors.
  Job* Pick() {
    if (callers_ + helping_ >= NumThreads()) return nullptr;
    auto best = jobs_.end();
    for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
      if (!(*job)->HasTasks()) continue;
      if (best == jobs_.end() || (*job)->Helpers() < (*best)->Helpers()) best = job;
    }
    if (best == jobs_.end()) return nullptr;
    std::rotate(best, best + 1, jobs_.end());
    return jobs_.back();
  }

  std::once_flag start_;
  std::mutex mutex_;
  std::condition_variable wake_;      // workers: there may be a job to help
  std::condition_variable finished_;  // callers: a job has lost its last helper
  std::vector<Job*> jobs_;            // the job that was helped longest ago is first
  int callers_ = 0;
  int helping_ = 0;
};

// Never destroyed: detached workers sleep in it until the process ends.
Pool* const pool = new Pool;

// A fork copies the pool's state, perhaps locked, but not its workers. So a child process that
// forked after the first use never touches the pool and computes on the calling thread.
std::atomic<bool> workers_lost{false};

void WatchForks() {
  static std::once_flag first;
  std::call_once(first, [] { pthread_atfork(nullptr, nullptr, [] { workers_lost = true; }); });
}

}  // namespace

int NumThreads() {
  static const int number = CountThreads();
  return workers_lost.load(std::memory_order_relaxed) ? 1 : number;
}

void ParallelFor(int64_t tasks, const std::function<void(int64_t)>& task) {
  if (tasks <= 1 || NumThreads() == 1) {
    for (int64_t i = 0; i < tasks; ++i) task(i);
    return;
  }
  WatchForks();
  Job job{&task, tasks};
  pool->Run(&job);
}

}  // namespace syncbn
