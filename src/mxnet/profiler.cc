// MXNet keeps what a task measures, in memory, even before the profiler is first started, and its C
// interface does not tell whether it runs. So the state is read where MXNet has it, which takes a
// nanosecond, and a task is made only while it is "running". A task belongs to one span, because it
// holds the time of one start; what it has measured outlives it.
#include "mxnet/profiler.h"

#include <map>
#include <mutex>
#include <string>

#include "core/span.h"
#include "mxnet/mxnet_api.h"

namespace syncbn {
namespace {

// The first members of mxnet::profiler::Profiler in all releases from 1.6.0 to 2.0.0 (profiler.h).
constexpr int kLatestKnown = 20000;
struct ProfilerHead {
  void* virtual_functions;
  std::recursive_mutex mutex;
  int state;
};
constexpr int kRunning = 1;

bool IsRunning() {
  static const auto* const head = static_cast<const ProfilerHead*>(Mxnet().GetProfiler(nullptr));
  return __atomic_load_n(&head->state, __ATOMIC_RELAXED) == kRunning;
}

// A trace shows each domain as a process. MXNet never deletes one.
void* DomainOf(const std::string& device) {
  static std::mutex& mutex = *new std::mutex;  // operators may outlive static destructors
  static std::map<std::string, void*>& domains = *new std::map<std::string, void*>;
  std::lock_guard<std::mutex> lock(mutex);
  void*& domain = domains[device];
  if (domain == nullptr) Mxnet().ProfileCreateDomain(("SyncBatchNorm " + device).c_str(), &domain);
  return domain;
}

void* Begin(const std::string& device, const std::string& name) {
  void* task = nullptr;
  if (Mxnet().ProfileCreateTask(DomainOf(device), name.c_str(), &task) != 0) return nullptr;
  Mxnet().ProfileDurationStart(task);
  return task;
}

void End(void* task) {
  Mxnet().ProfileDurationStop(task);
  Mxnet().ProfileDestroyHandle(task);
}

}  // namespace

void ShowSpansInMxnetProfiler() {
  static const Profiler tasks{IsRunning, Begin, End};
  int version = 0;
  CheckMxnet(Mxnet().GetVersion(&version));
  if (Mxnet().GetProfiler != nullptr && version <= kLatestKnown) profiler = &tasks;
}

}  // namespace syncbn
