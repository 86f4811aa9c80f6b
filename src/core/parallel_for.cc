#include "core/parallel_for.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/spare_threads.h"

namespace syncbn {
namespace {

// A worker picks another job after this many tasks, so that concurrent callers take turns.
constexpr int kTasksPerTurn = 4;

// A caller checks this many times whether its helpers are done before it sleeps.
constexpr int kSpins = 4000;

// The tasks of a call of ParallelFor, on the caller's stack.
struct Job {
  const std::function<void(int64_t)>* task;
  int64_t tasks;
  std::atomic<int64_t> next{0};
  std::atomic<int> helpers{0};  // workers in Run; none begins after the job has left the list

  void Run(int64_t most_tasks) noexcept {
    for (; most_tasks > 0; --most_tasks) {
      const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= tasks) return;
      (*task)(i);
    }
  }
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

// A forked child has a copy of the pool, whose mutex may be locked, but no workers. So the child
// does not use the pool.
std::atomic<bool> workers_lost{false};

class Pool {
 public:
  void Run(Job* job) {
    std::call_once(start_, [this] { Start(); });
    Add(job);
    job->Run(job->tasks);
    Remove(job);
    for (int i = 0; i < kSpins; ++i) {
      if (job->helpers.load(std::memory_order_acquire) == 0) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return job->helpers.load(std::memory_order_acquire) == 0; });
  }

 private:
  void Start() {
    pthread_atfork(nullptr, nullptr, [] { workers_lost = true; });
    try {
      for (int i = 1; i < NumThreads(); ++i) RunInSpareThread([this] { Work(); });
    } catch (const std::system_error&) {
      // The system has no more threads. Fewer workers suffice.
    }
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
    if (!jobs_.empty()) wake_.notify_one();  // a worker can use this caller's processor
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
      // After this the caller, which reads `helpers` without the mutex, may free the job.
      if (job->helpers.fetch_sub(1, std::memory_order_release) == 1) finished_.notify_all();
    }
  }

  // Returns the first job with tasks and moves it to the end of the list. Returns null if there is
  // none, or if callers and workers already occupy all processors.
  Job* Pick() {
    if (callers_ + helping_ >= NumThreads()) return nullptr;
    const auto picked = std::find_if(jobs_.begin(), jobs_.end(), [](const Job* job) {
      return job->next.load(std::memory_order_relaxed) < job->tasks;
    });
    if (picked == jobs_.end()) return nullptr;
    std::rotate(picked, picked + 1, jobs_.end());
    return jobs_.back();
  }

  std::once_flag start_;
  std::mutex mutex_;
  std::condition_variable wake_;      // workers wait here for a job
  std::condition_variable finished_;  // callers wait here until their job has no helper
  std::vector<Job*> jobs_;
  int callers_ = 0;
  int helping_ = 0;
};

// Never destroyed, because detached workers sleep in it until the process ends.
Pool* const pool = new Pool;

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
  Job job{&task, tasks};
  pool->Run(&job);
}

}  // namespace syncbn
