// One mutex around a Protocol, the waits for it, and the thread that answers other processes.
#include "collective/processes/communicator.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "collective/processes/backoff.h"
#include "collective/processes/report.h"
#include "core/error.h"

namespace syncbn {
namespace {

// A fork copies neither the thread nor the connection to the other processes.
std::atomic<bool> forked{false};

// Messages that are served before another thread gets the mutex.
constexpr int kServedAtOnce = 256;

// The time for a transport to deliver the last messages, and for others to leave after a failure.
constexpr double kEndSeconds = 2;

std::atomic<Communicator*> the_communicator{nullptr};

}  // namespace

Communicator* TheCommunicator() { return the_communicator; }
void OpenCommunicator(std::unique_ptr<Transport> transport) {
  the_communicator = new Communicator(std::move(transport));
}

Communicator::Communicator(std::unique_ptr<Transport> transport)
    : transport_(std::move(transport)),
      protocol_(rank(), size(), [this](int to, Bytes message) {
        if (!closed_) transport_->Send(to, std::move(message));
      }) {
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  transport_->OnClose([this] { Stop(); });
  // Signals belong to the threads of the program.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { Work(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Communicator::~Communicator() { Stop(); }

// Before the mutex, which another thread may have held at the fork.
void Communicator::CheckNotForked(const std::string& title) const {
  if (forked) {
    throw Error(Concat(title, ": called in a process that was forked from rank ", rank(),
                       "; only the process that called ", kInit, " synchronizes"));
  }
}

// ---- waiting -----------------------------------------------------------------------------------

// Returns whether a message had arrived.
bool Communicator::ServeLocked() {
  if (closed_) return false;
  int served = 0;
  try {
    int from = 0;
    Bytes bytes;
    for (; served < kServedAtOnce && transport_->Receive(&from, &bytes); ++served) {
      protocol_.Handle(from, bytes, Clock::now());
    }
  } catch (const std::exception& error) {
    protocol_.Fail(error.what());
  }
  // A deadline may concern a message that had arrived.
  if (served < kServedAtOnce) protocol_.Tick(Clock::now());
  return served > 0;
}

// Serves until `over()`, which the protocol's deadlines make true at the latest.
template <typename Predicate>
void Communicator::WaitLocked(Lock* lock, const Predicate& over) {
  Backoff backoff;
  for (;;) {
    const bool any = ServeLocked();
    if (over()) return;
    lock->unlock();
    if (any) {
      std::this_thread::yield();
    } else {
      backoff.Pause();
    }
    lock->lock();
  }
}

void Communicator::Work() {
  Lock lock(mutex_);
  Backoff backoff;
  while (!closed_) {
    if (ServeLocked()) backoff.Restart();
    if (protocol_.joining().active() || transport_->Busy()) {
      lock.unlock();
      backoff.Pause();
      lock.lock();
    } else {
      // Now only queries arrive, from ranks that have waited for long.
      stop_changed_.wait_for(lock, std::chrono::milliseconds(2));
      backoff.Restart();
    }
  }
}

// ---- exchanges -------------------------------------------------------------------------

Bytes Communicator::AllReduce(Contribution contribution) {
  CheckNotForked(contribution.title);
  Lock lock(mutex_);
  const auto pending = protocol_.Begin(std::move(contribution), Clock::now());
  WaitLocked(&lock, [&] { return pending->over(); });
  return pending->Result();
}

int Communicator::Join(double timeout_seconds) {
  CheckNotForked(kJoin);
  Lock lock(mutex_);
  protocol_.Join(timeout_seconds, Clock::now());
  WaitLocked(&lock, [&] { return !protocol_.joining().active(); });
  return protocol_.joining().Result();
}

std::string Communicator::NextKey(const std::string& name) {
  if (forked) return name;
  Lock lock(mutex_);
  return protocol_.NextKey(name);
}

void Communicator::Fail(const std::string& text) {
  if (forked) return;
  Lock lock(mutex_);
  protocol_.Fail(text);
}

std::string Communicator::Failure() const {
  if (forked) return "";
  Lock lock(mutex_);
  return protocol_.failure();
}

void Communicator::Reset() {
  if (forked) return;
  Lock lock(mutex_);
  protocol_.Reset();
}

// ---- the end -----------------------------------------------------------------------------------

void Communicator::Leave() {
  if (forked) return;
  Lock lock(mutex_);
  protocol_.Leave();
}

bool Communicator::AwaitLeave(double timeout_seconds) {
  if (forked) return false;
  Lock lock(mutex_);
  // After a failure some may never leave, and others end soon.
  Leaving& leaving = protocol_.leaving();
  if (!leaving.clean()) timeout_seconds = std::min(timeout_seconds, kEndSeconds);
  const auto deadline = Clock::now() + ToDuration(timeout_seconds);
  leaving.Await();
  bool all = false;
  WaitLocked(&lock, [&] {
    all = !closed_ && leaving.Complete() && !transport_->Busy();
    return all || closed_ || leaving.HasUnresponsive() || Clock::now() >= deadline;
  });
  return all;
}

void Communicator::Stop() {
  if (forked) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  Lock lock(mutex_);
  protocol_.Leave();
  const auto deadline = Clock::now() + ToDuration(kEndSeconds);
  WaitLocked(&lock, [&] { return closed_ || !transport_->Busy() || Clock::now() >= deadline; });
  closed_ = true;
  lock.unlock();
  stop_changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace syncbn
