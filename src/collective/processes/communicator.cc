#include "collective/processes/communicator.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "collective/processes/backoff.h"
#include "collective/processes/report.h"
#include "core/error.h"

namespace syncbn {
namespace {

// A fork does not copy the connection to the other processes.
std::atomic<bool> forked{false};

constexpr double kEndSeconds = 2;     // for a transport to deliver the last messages
constexpr double kLeaveSeconds = 10;  // for others to leave after a failure
constexpr double kCloseSeconds = 30;  // before all are ended, on a busy machine

std::atomic<Communicator*> the_communicator{nullptr};

}  // namespace

Communicator* TheCommunicator() { return the_communicator; }
void OpenCommunicator(std::unique_ptr<Transport> transport) {
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  the_communicator = new Communicator(std::move(transport));
}

Communicator::Communicator(std::unique_ptr<Transport> transport)
    : transport_(std::move(transport)),
      protocol_(rank(), size(), [this](int to, Bytes message) {
        if (!closed_) transport_->Send(to, std::move(message));
      }) {
  transport_->OnClose([this] { return Close(); });
}

// Before the mutex, which another thread may have held at the fork.
void Communicator::CheckNotForked(const std::string& title) const {
  if (forked) {
    throw Error(Concat(title, ": called in a process that was forked from rank ", rank(),
                       "; only the process that called ", kInit, " synchronizes"));
  }
}

// Serves one message; false if none has arrived.
bool Communicator::ServeLocked() {
  if (closed_) return false;
  const Time now = Clock::now();
  try {
    int from = 0;
    Bytes bytes;
    if (transport_->Receive(&from, &bytes)) {
      protocol_.Handle(from, bytes, now);
      return true;
    }
  } catch (const std::exception& error) {
    protocol_.Fail(error.what());
  }
  protocol_.Tick(now);  // now that no message is left that a deadline may concern
  return false;
}

// Serves until `over()`, which the protocol's deadlines make true at the latest.
template <typename Predicate>
void Communicator::WaitLocked(Lock* lock, const Predicate& over) {
  Backoff backoff;
  while (!over()) {
    if (ServeLocked()) {
      backoff.Restart();
      continue;
    }
    lock->unlock();
    backoff.Pause();
    lock->lock();
  }
}

Bytes Communicator::AllReduce(Contribution contribution) {
  CheckNotForked(contribution.title);
  Lock lock(mutex_);
  const auto exchange = protocol_.Begin(std::move(contribution), Clock::now());
  // A large message goes out only while the sender polls; its receiver is polling already.
  WaitLocked(&lock, [&] {
    const bool under_way = transport_->Busy() && Clock::now() < exchange->deadline;
    return !exchange->error.empty() || (exchange->done && !under_way);
  });
  if (!exchange->error.empty()) throw Error(exchange->error);
  return std::move(exchange->result);
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

std::string Communicator::Failure() {
  if (forked) return "";
  Lock lock(mutex_);
  while (ServeLocked()) continue;
  return protocol_.failure();
}

void Communicator::Leave() {
  if (forked) return;
  Lock lock(mutex_);
  protocol_.Leave();
}

void Communicator::AwaitLeave(double timeout_seconds) {
  // After a failure some may never leave, and others end soon.
  if (!Failure().empty()) timeout_seconds = std::min(timeout_seconds, kLeaveSeconds);
  AwaitLeaveFor(timeout_seconds);
}

void Communicator::AwaitLeaveFor(double timeout_seconds) {
  if (forked) return;
  Lock lock(mutex_);
  const Time deadline = Clock::now() + ToDuration(timeout_seconds);
  WaitLocked(&lock, [&] {
    return closed_ || protocol_.AllHaveLeft() || Clock::now() >= deadline;
  });
}

void Communicator::Stop() {
  if (forked) return;
  Lock lock(mutex_);
  protocol_.Leave();
  const Time deadline = Clock::now() + ToDuration(kEndSeconds);
  WaitLocked(&lock, [&] { return closed_ || !transport_->Busy() || Clock::now() >= deadline; });
  if (!closed_) transport_->Close();
  closed_ = true;
}

bool Communicator::Close() {
  Leave();
  const bool has_failed = !Failure().empty();
  if (has_failed) AwaitLeaveFor(kCloseSeconds);
  Stop();
  return !has_failed || protocol_.AllHaveLeft();
}

}  // namespace syncbn
