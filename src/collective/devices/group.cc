// One mutex guards it all: it is held briefly, and devices of one layer wait for each other anyway.
#include "collective/devices/group.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

#include "collective/common/timeout.h"
#include "collective/devices/report.h"
#include "core/error.h"
#include "core/program.h"

namespace syncbn {
namespace {

constexpr std::chrono::seconds kNotice{10};
std::atomic<bool> notice_given{false};  // since the latest Reset

}  // namespace

Ticket Group::BeginForward(const Device& device, size_t size) {
  Lock lock(mutex_);
  if (!failure_.empty()) throw Error(EarlierFailureReport(layer_, "forward", device, failure_));
  if (participants_ && !participants_->count(device)) {
    FailAndThrow(NoParticipantReport(layer_, device, *participants_));
  }
  size_ = size;
  if (!numbers_.next.count(device)) EnterLocked(device, size);
  return {numbers_.Take(device), participants_};
}

// One device too many means that either the net has moved to other devices, and the old ones no
// longer call; or more devices are in use than the group is for. A former member must not take the
// place of a new one: its batch would be reduced with their older one.
void Group::EnterLocked(const Device& device, size_t size) {
  const std::set<Device> members = numbers_.Members();
  const bool full = members.size() >= size;
  if (former_members_.count(device) || (full && !rendezvous_.empty())) {
    FailAndThrow(TooManyDevicesReport(layer_, device, members, size));
  }
  if (!full) return;
  former_members_.insert(members.begin(), members.end());
  numbers_.Restart();
  rendezvous_.clear();
}

void Group::CheckLocked(const Ticket& ticket, const std::string& phase, const Device& device) {
  if (!failure_.empty()) throw Error(EarlierFailureReport(layer_, phase, device, failure_));
  if (!numbers_.IsVoid(ticket.number)) return;
  if (former_members_.count(device)) {
    FailAndThrow(TooManyDevicesReport(layer_, device, numbers_.Members(), size_));
  }
  throw Error(EarlierFailureReport(layer_, phase, device, kWasReset));
}

std::shared_ptr<const Reduced> Group::AllReduce(AllReduceOptions options) {
  Lock lock(mutex_);
  CheckLocked(options.ticket, options.phase, options.device);
  if (options.ticket.participants) options.expected = *options.ticket.participants;
  if (options.ticket.participants) options.size = options.expected.size();
  processes_ = options.processes;
  const RendezvousKey key{options.ticket.number, options.repeat, options.phase};
  std::shared_ptr<Rendezvous> rendezvous = rendezvous_[key];
  if (!rendezvous) rendezvous = rendezvous_[key] = std::make_shared<Rendezvous>();
  const bool is_last = rendezvous->arrivals.size() + 1 == options.size;
  Reduced result{{}, options.ticket.key};
  try {
    rendezvous->Add(options.device, std::move(options.arrival));
    if (is_last) result.payload = rendezvous->ReducePayloads(options.contribution.operation);
  } catch (const Error& error) {
    FailAndThrow(Concat(Title(layer_, options.phase), ": ", error.what()));
  }
  if (!is_last) {
    AwaitLocked(&lock, *rendezvous, options);
    return rendezvous->result;
  }
  if (processes_ != nullptr) ExchangeLocked(&lock, options, &result);
  rendezvous->result = std::make_shared<const Reduced>(std::move(result));
  rendezvous_.erase(key);
  changed_.NotifyAll();
  return rendezvous->result;
}

// Processes exchange without the mutex, which devices need in order to arrive and to fail.
void Group::ExchangeLocked(Lock* lock, const AllReduceOptions& options, Reduced* result) {
  const Time start = Clock::now();
  std::string error;
  lock->unlock();
  try {
    ExchangeBetweenProcesses(options, result);
  } catch (const std::exception& raised) {
    error = raised.what();
  }
  lock->lock();
  wait_seconds_[options.device] += ToSeconds(Clock::now() - start);
  CheckAfterWait(options.ticket);
  if (!error.empty()) FailAndThrow(error);
}

void Group::AwaitLocked(Lock* lock, const Rendezvous& rendezvous, const AllReduceOptions& options) {
  const Time start = Clock::now();
  const Time deadline = start + ToDuration(options.contribution.timeout_seconds);
  // A result counts even if the group fails, or time runs out, before this thread is awake again.
  const auto over = [&] {
    return rendezvous.result != nullptr || !failure_.empty() ||
           numbers_.IsVoid(options.ticket.number);
  };
  const Time notice = std::min(deadline, start + kNotice);
  std::string report;
  bool is_over = changed_.WaitUntil(lock, notice, over);
  const auto seconds = [&] { return ToSeconds(Clock::now() - start); };
  const auto is_missing = [&] { return !is_over && rendezvous.arrivals.size() < options.size; };
  if (notice < deadline && is_missing()) {
    if (!notice_given.exchange(true)) {
      report = ReportTimeoutLocked(lock, rendezvous, options, seconds());
      std::fprintf(stderr, "gluon_syncbn raises this error after %g s:\n%s\n",
                   options.contribution.timeout_seconds, report.c_str());
    }
    is_over = changed_.WaitUntil(lock, Clock::now() + (deadline - notice), over);
  }
  if (is_missing()) report = ReportTimeoutLocked(lock, rendezvous, options, seconds());
  if (rendezvous.arrivals.size() == options.size) {
    changed_.Wait(lock, over);  // the exchange with other processes has its own deadline
  }
  wait_seconds_[options.device] += seconds();
  if (rendezvous.result != nullptr) return;
  CheckAfterWait(options.ticket);
  FailAndThrow(report);
}

std::string Group::ReportTimeoutLocked(Lock* lock, const Rendezvous& rendezvous,
                                       const AllReduceOptions& options, double waited) const {
  lock->unlock();
  const std::string where = WhereProgramStands();
  lock->lock();
  const bool are_expected = options.expected.size() == options.size;
  for (const auto& [device, arrival] : rendezvous.arrivals) {
    if (!are_expected || options.expected.count(device)) continue;
    return TooManyDevicesReport(layer_, device, options.expected, options.size);
  }
  return TimeoutReport(Title(layer_, options.phase), rendezvous, options.size,
                       are_expected ? options.expected : numbers_.Members(), waited, where);
}

void Group::CheckAfterWait(const Ticket& ticket) const {
  if (!failure_.empty()) throw Error(failure_);
  if (numbers_.IsVoid(ticket.number)) {
    throw Error("the layer was reset while a device waited in it");
  }
}

void Group::SetParticipants(std::set<Device> participants) {
  Lock lock(mutex_);
  numbers_.Level();
  participants_ = nullptr;  // all
  if (!participants.empty()) {
    participants_ = std::make_shared<const std::set<Device>>(std::move(participants));
  }
}

double Group::WaitSeconds(const Device& device) const {
  Lock lock(mutex_);
  const auto found = wait_seconds_.find(device);
  return found == wait_seconds_.end() ? 0 : found->second;
}

double Group::LongestWait() const {
  Lock lock(mutex_);
  if (!failure_.empty() || rendezvous_.empty()) return 0;
  const auto is_older = [](const auto& a, const auto& b) {
    return a.second->start < b.second->start;
  };
  const auto oldest = std::min_element(rendezvous_.begin(), rendezvous_.end(), is_older);
  return ToSeconds(Clock::now() - oldest->second->start);
}

void Group::Fail(const std::string& text) {
  Lock lock(mutex_);
  // Other processes can notice only an exchange that has begun.
  if (processes_ != nullptr && !rendezvous_.empty()) processes_->Fail(text);
  SetFailure(text);
  changed_.NotifyAll();
}

void Group::SetFailure(const std::string& text) {
  if (failure_.empty() == text.empty()) return;
  failure_ = text;
  failed += text.empty() ? -1 : 1;
}

void Group::Reset() {
  notice_given = false;
  Lock lock(mutex_);
  former_members_.clear();
  numbers_.Restart();
  rendezvous_.clear();
  SetFailure("");
  changed_.NotifyAll();
}

void Group::FailAndThrow(const std::string& text) {
  SetFailure(text);
  if (processes_ != nullptr) processes_->Fail(failure_);
  changed_.NotifyAll();
  throw Error(text);
}

}  // namespace syncbn
