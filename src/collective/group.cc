// Numbers of calls, rendezvous and their failure. One mutex guards it all: it is held for a short
// time, and devices of one layer wait for each other anyway.
#include "collective/group.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "collective/reduce_operation.h"
#include "collective/report.h"
#include "collective/timeout.h"
#include "core/error.h"

namespace syncbn {
namespace {

std::set<Device> Keys(const std::map<Device, int64_t>& calls) {
  std::set<Device> keys;
  for (const auto& entry : calls) keys.insert(entry.first);
  return keys;
}

}  // namespace

Ticket Group::BeginForward(const Device& device, size_t size) {
  Lock lock(mutex_);
  if (!failure_.empty()) {
    throw Error(EarlierFailureReport(Title(layer_, "forward"), device, failure_));
  }
  if (participants_ && !participants_->count(device)) {
    FailAndThrow(SitsOutReport(layer_, device, *participants_));
  }
  size_ = size;
  auto member = forward_calls_.find(device);
  if (member == forward_calls_.end()) {
    // When one device more arrives, either the net has moved to other devices, and the old ones are
    // silent from now on; or more devices are in use than the group is for. A former member must
    // not fill a place of the new ones: its batch would be reduced with their older one.
    const bool full = forward_calls_.size() >= size;
    const bool beside = AnyoneWaitsLocked() || (size == 1 && IsDrivenBesideMemberLocked(device));
    if (former_members_.count(device) || (full && beside)) {
      FailAndThrow(TooManyDevicesReport(layer_, device, Keys(forward_calls_), size));
    }
    if (full) {
      for (const auto& entry : forward_calls_) former_members_.insert(entry.first);
      StartGenerationLocked();
    }
    member = forward_calls_.emplace(device, first_number_).first;
  }
  return {generation_, member->second++, participants_};
}

CallLog::Epoch Group::NoteQueued(const Device& device, bool* is_first) {
  Lock lock(mutex_);
  *is_first = !calls_.HasSeen(device);
  return calls_.NoteQueued(device);
}

void Group::NoteBegun(const Device& device, CallLog::Epoch epoch, bool is_first) {
  Lock lock(mutex_);
  calls_.NoteBegun(device, epoch, is_first);
}

void Group::ExpectDriver() {
  Lock lock(mutex_);
  needs_driver_ = true;
}

void Group::Check(const Ticket& ticket, const std::string& phase, const Device& device) {
  Lock lock(mutex_);
  CheckLocked(ticket, phase, device);
}

std::shared_ptr<const Bytes> Group::AllReduce(const Ticket& ticket, const RendezvousKey& key,
                                              const Device& device, Arrival arrival,
                                              RendezvousOptions options) {
  Lock lock(mutex_);
  CheckLocked(ticket, key.phase, device);
  if (ticket.participants) {
    options.size = ticket.participants->size();
    options.expected = *ticket.participants;
  }
  processes_ = options.across.processes;
  std::shared_ptr<Rendezvous>& slot = rendezvous_[key];
  if (!slot) slot = std::make_shared<Rendezvous>();
  const std::shared_ptr<Rendezvous> rendezvous = slot;
  auto& arrivals = rendezvous->arrivals;
  if (arrivals.count(device)) FailAndThrow(TwiceReport(Title(layer_, key.phase), device));
  if (!arrivals.empty() && arrivals.begin()->second.signature != arrival.signature) {
    FailAndThrow(DisagreementReport(Title(layer_, key.phase), *rendezvous, device, arrival));
  }
  arrivals.emplace(device, std::move(arrival));
  if (arrivals.size() == options.size) {
    Bytes result = ReduceLocked(key, *rendezvous, options.operation);
    if (processes_ != nullptr) {
      rendezvous->exchanging = true;
      result = ExchangeLocked(&lock, ticket, key, options, std::move(result));
    }
    rendezvous->result = std::make_shared<const Bytes>(std::move(result));
    changed_.NotifyAll();
  } else {
    AwaitLocked(&lock, ticket, key, rendezvous, options);
  }
  // In another generation the map may hold a younger rendezvous under the same key.
  const bool last = ++rendezvous->departures == options.size;
  if (last && generation_ == ticket.generation) rendezvous_.erase(key);
  return rendezvous->result;
}

void Group::CheckLocked(const Ticket& ticket, const std::string& phase, const Device& device) {
  if (!failure_.empty()) {
    throw Error(EarlierFailureReport(Title(layer_, phase), device, failure_));
  }
  if (ticket.generation != generation_) {
    if (former_members_.count(device)) {
      FailAndThrow(TooManyDevicesReport(layer_, device, Keys(forward_calls_), size_));
    }
    throw Error(EarlierFailureReport(Title(layer_, phase), device, WasResetReport()));
  }
}

Bytes Group::ReduceLocked(const RendezvousKey& key, const Rendezvous& rendezvous,
                          const std::string& operation) {
  auto arrival = rendezvous.arrivals.begin();
  Bytes result = arrival->second.payload;
  try {
    const ReduceOperation reduce = FindReduceOperation(operation);
    while (++arrival != rendezvous.arrivals.end()) reduce(arrival->second.payload, &result);
  } catch (const Error& error) {  // payloads that do not fit together
    FailAndThrow(Concat(Title(layer_, key.phase), ": ", error.what()));
  }
  return result;
}

// The one exchange of a rendezvous with other processes, for which the mutex is released.
Bytes Group::ExchangeLocked(Lock* lock, const Ticket& ticket, const RendezvousKey& key,
                            const RendezvousOptions& options, Bytes payload) {
  const AcrossProcesses& across = options.across;
  const size_t size = payload.size();
  Contribution contribution;
  contribution.key = Concat(across.name, '|', key.phase, '|', SharedNumberLocked(ticket, key), '|',
                            key.repeat);
  contribution.title = Title(across.name, key.phase);
  contribution.signature = across.signature;
  contribution.operation = options.operation;
  contribution.ranks = across.ranks;
  contribution.timeout_seconds = options.timeout_seconds;
  contribution.payload = std::move(payload);
  lock->unlock();
  Bytes result;
  std::string error;
  try {
    result = across.processes->AllReduce(std::move(contribution));
    if (result.size() != size) {
      error = Concat(Title(across.name, key.phase), ": other ranks sent ", result.size(),
                     " bytes, expected ", size);
    }
  } catch (const std::exception& raised) {
    error = raised.what();
  }
  lock->lock();
  if (!failure_.empty()) throw Error(failure_);
  if (generation_ != ticket.generation) {
    throw Error("the layer was reset while it waited for other ranks");
  }
  if (!error.empty()) FailAndThrow(error);
  return result;
}

// The forward call's number in the generation of the processes, which every rank counts alike.
int64_t Group::SharedNumberLocked(const Ticket& ticket, const RendezvousKey& key) {
  const int64_t call = calls_before_generation_ + ticket.number;
  const Generation shared = processes_->generation();
  if (key.phase == "forward" && !(shared == shared_generation_)) {
    shared_generation_ = shared;
    first_shared_call_ = call;
  }
  return call - first_shared_call_;
}

void Group::AwaitLocked(Lock* lock, const Ticket& ticket, const RendezvousKey& key,
                        const std::shared_ptr<Rendezvous>& rendezvous,
                        const RendezvousOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const auto deadline = start + ToDuration(options.timeout_seconds);
  // A result counts even if the group fails, or time runs out, before this thread is awake again.
  const auto over = [&] {
    return rendezvous->result != nullptr || !failure_.empty() || generation_ != ticket.generation;
  };
  bool woken = changed_.WaitUntil(lock, deadline, over);
  if (!woken && rendezvous->exchanging) {  // the exchange has a deadline of its own
    changed_.Wait(lock, over);
    woken = true;
  }
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
  wait_seconds_ += waited.count();
  if (rendezvous->result != nullptr) return;
  if (!woken) {
    FailAndThrow(TimeoutReport(Title(layer_, key.phase), *rendezvous,
                               DescribeLocked(key, *rendezvous, options), waited.count()));
  }
  throw Error(failure_.empty() ? "the layer was reset while a device waited in it" : failure_);
}

Absence Group::DescribeLocked(const RendezvousKey& key, const Rendezvous& rendezvous,
                              const RendezvousOptions& options) const {
  Absence absence;
  absence.is_forward = key.phase == "forward";
  absence.needs_driver = needs_driver_;
  absence.size = options.size;
  absence.on = options.expected;
  for (const auto& entry : rendezvous.arrivals) absence.arrived.insert(entry.first);
  std::set<Device> known = Keys(forward_calls_);
  if (options.expected.size() == options.size) known = options.expected;
  for (const Device& device : known) {
    if (!absence.arrived.count(device)) absence.missing.insert(device);
  }
  absence.unknown = options.size - absence.arrived.size() - absence.missing.size();
  calls_.Describe(&absence);
  return absence;
}

void Group::SetParticipants(std::set<Device> participants) {
  Lock lock(mutex_);
  first_number_ = std::max(first_number_, MostCallsLocked());
  for (auto& entry : forward_calls_) entry.second = first_number_;
  participants_ = participants.empty()
                      ? nullptr
                      : std::make_shared<const std::set<Device>>(std::move(participants));
}

double Group::WaitSeconds() const {
  Lock lock(mutex_);
  return wait_seconds_;
}

void Group::Fail(const std::string& text) {
  Lock lock(mutex_);
  // Other processes can notice only an exchange that has begun.
  if (processes_ != nullptr && AnyoneWaitsLocked()) processes_->Fail(text);
  if (failure_.empty()) failure_ = text;
  changed_.NotifyAll();
}

std::string Group::Failure() const {
  Lock lock(mutex_);
  return failure_;
}

void Group::Reset() {
  Lock lock(mutex_);
  former_members_.clear();
  calls_.Clear();
  StartGenerationLocked();
  failure_.clear();
  changed_.NotifyAll();
}

void Group::FailAndThrow(const std::string& text) {
  if (failure_.empty()) failure_ = text;
  if (processes_ != nullptr) processes_->Fail(failure_);
  changed_.NotifyAll();
  throw Error(text);
}

void Group::StartGenerationLocked() {
  calls_before_generation_ += FinishedCallsLocked();
  ++generation_;
  rendezvous_.clear();
  forward_calls_.clear();
  first_number_ = 0;
}

int64_t Group::MostCallsLocked() const {
  int64_t calls = 0;
  for (const auto& entry : forward_calls_) calls = std::max(calls, entry.second);
  return calls;
}

// A rendezvous at which some device never arrived was not reduced.
int64_t Group::FinishedCallsLocked() const {
  const size_t size = participants_ ? participants_->size() : size_;
  size_t devices = 0;
  int64_t finished = std::numeric_limits<int64_t>::max();
  for (const auto& entry : forward_calls_) {
    if (participants_ && !participants_->count(entry.first)) continue;
    finished = std::min(finished, entry.second);
    ++devices;
  }
  return devices > 0 && devices >= size ? finished : first_number_;
}

// In a group of one nobody waits, but a driver of several devices tells that they are in use.
bool Group::IsDrivenBesideMemberLocked(const Device& device) const {
  return calls_.IsOneOfSeveral(device) &&
         std::any_of(forward_calls_.begin(), forward_calls_.end(),
                     [&](const auto& entry) { return calls_.IsOneOfSeveral(entry.first); });
}

bool Group::AnyoneWaitsLocked() const {
  return std::any_of(rendezvous_.begin(), rendezvous_.end(),
                     [](const auto& entry) { return entry.second->result == nullptr; });
}

}  // namespace syncbn
