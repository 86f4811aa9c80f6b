// Numbers of calls, rounds and their failure. One mutex guards it all: a round is short, and
// devices of one layer meet there anyway.
#include "collective/group.h"

#include <algorithm>
#include <limits>
#include <utility>

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
    throw Error(EarlierFailureReport(layer_, "forward", device, failure_));
  }
  if (participants_ && !participants_->count(device)) {
    FailAndThrow(SitsOutReport(layer_, device, *participants_));
  }
  size_ = size;
  auto member = forward_calls_.find(device);
  if (member == forward_calls_.end()) {
    // When one device more comes, either the net has moved to other devices, then the old ones are
    // silent from now on; or more devices are in use than the group is for. A former member must
    // not fill a place of the new ones: it would meet their older batch.
    const bool full = forward_calls_.size() >= size;
    if (former_members_.count(device) || (full && AnyoneWaitsLocked())) {
      FailAndThrow(TooManyDevicesReport(layer_, device, Keys(forward_calls_), size));
    }
    if (full) {
      for (const auto& entry : forward_calls_) former_members_.insert(entry.first);
      StartEpochLocked();
    }
    member = forward_calls_.emplace(device, first_number_).first;
  }
  return {epoch_, member->second++, participants_};
}

bool Group::IsFirstSeen(const Device& device) {
  Lock lock(mutex_);
  return seen_.insert(device).second;
}

void Group::Check(const Ticket& ticket, const std::string& operation, const Device& device) {
  Lock lock(mutex_);
  CheckLocked(ticket, operation, device);
}

std::shared_ptr<const Payload> Group::AllReduce(const Ticket& ticket, const RoundKey& key,
                                                const Device& device, Arrival arrival,
                                                Meeting meeting, Reducer reducer) {
  Lock lock(mutex_);
  CheckLocked(ticket, key.operation, device);
  if (ticket.participants) {
    meeting.size = ticket.participants->size();
    meeting.expected = *ticket.participants;
  }
  processes_ = meeting.across.processes;
  std::shared_ptr<Round>& slot = rounds_[key];
  if (!slot) slot = std::make_shared<Round>();
  const std::shared_ptr<Round> round = slot;
  if (round->arrivals.count(device)) FailAndThrow(TwiceReport(layer_, key.operation, device));
  if (!round->arrivals.empty() &&
      round->arrivals.begin()->second.contract != arrival.contract) {
    FailAndThrow(DisagreementReport(layer_, key.operation, *round, device, arrival));
  }
  arrival.time = std::chrono::steady_clock::now();
  round->arrivals.emplace(device, std::move(arrival));
  if (round->arrivals.size() == meeting.size) {
    std::vector<const Payload*> payloads;
    for (const auto& entry : round->arrivals) payloads.push_back(&entry.second.payload);
    auto result = std::make_shared<Payload>();
    reducer(payloads, result.get());
    if (processes_ != nullptr) {
      ExchangeLocked(&lock, ticket, key, round.get(), meeting, result.get());
    }
    round->result = result;
    changed_.NotifyAll();
  } else {
    AwaitLocked(&lock, key, round, meeting, ticket.epoch);
  }
  // In another epoch the map may hold a younger round under the same key.
  if (++round->departures == meeting.size && epoch_ == ticket.epoch) rounds_.erase(key);
  return round->result;
}

void Group::CheckLocked(const Ticket& ticket, const std::string& operation,
                        const Device& device) {
  if (!failure_.empty()) {
    throw Error(EarlierFailureReport(layer_, operation, device, failure_));
  }
  if (ticket.epoch != epoch_) {
    if (former_members_.count(device)) {
      FailAndThrow(TooManyDevicesReport(layer_, device, Keys(forward_calls_), size_));
    }
    throw Error(EarlierFailureReport(layer_, operation, device,
                                     "the layer was reset by gluon_syncbn.recover() after the "
                                     "forward call that this call belongs to."));
  }
}

// The round's one exchange with other processes, for which the mutex is given up.
void Group::ExchangeLocked(Lock* lock, const Ticket& ticket, const RoundKey& key, Round* round,
                           const Meeting& meeting, Payload* payload) {
  const Across& across = meeting.across;
  Contribution contribution;
  contribution.key = Concat(across.name, '|', key.operation, '|',
                            SharedNumberLocked(ticket, key, across), '|', key.repeat);
  const std::string title = Concat("SyncBatchNorm '", across.name, "', ", key.operation);
  contribution.title = title;
  contribution.contract = across.contract;
  contribution.merger = across.merger;
  contribution.ranks = across.ranks;
  contribution.timeout_seconds = meeting.timeout_seconds;
  contribution.payload = ToBytes(*payload);
  round->exchanging = true;
  lock->unlock();
  std::string error;
  try {
    const size_t size = contribution.payload.size();
    const Bytes result = across.processes->AllReduce(std::move(contribution));
    if (result.size() != size) {
      throw Error(Concat(title, ": other ranks sent ", result.size(), " bytes, expected ", size));
    }
    *payload = ToPayload(result);
  } catch (const std::exception& raised) {
    error = raised.what();
  }
  lock->lock();
  if (!failure_.empty()) throw Error(failure_);
  if (epoch_ != ticket.epoch) throw Error("the layer was reset while it waited for other ranks");
  if (!error.empty()) FailAndThrow(error);
}

// The forward call's number in the era of the processes, which every rank counts alike.
int64_t Group::SharedNumberLocked(const Ticket& ticket, const RoundKey& key,
                                  const Across& across) {
  const int64_t call = calls_before_epoch_ + ticket.number;
  const int64_t era = across.processes->Era();
  if (key.operation == "forward" && era != era_) {
    era_ = era;
    first_call_of_era_ = call;
  }
  return call - first_call_of_era_;
}

void Group::AwaitLocked(Lock* lock, const RoundKey& key, const std::shared_ptr<Round>& round,
                        const Meeting& meeting, int64_t epoch) {
  const auto start = std::chrono::steady_clock::now();
  const auto deadline = start + ToDuration(meeting.timeout_seconds);
  // A result counts even if the group fails, or time runs out, before this thread is awake again.
  const auto over = [&] {
    return round->result != nullptr || !failure_.empty() || epoch_ != epoch;
  };
  bool woken = changed_.WaitUntil(lock, deadline, over);
  if (!woken && round->exchanging) {  // whose own deadline comes
    changed_.Wait(lock, over);
    woken = true;
  }
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
  wait_seconds_ += waited.count();
  if (round->result != nullptr) return;
  if (!woken) {
    std::set<Device> known = Keys(forward_calls_);
    if (meeting.expected.size() == meeting.size) known = meeting.expected;
    FailAndThrow(TimeoutReport(layer_, key.operation, *round, known, meeting.size,
                               waited.count()));
  }
  throw Error(failure_.empty() ? "the layer was reset while a device waited in it" : failure_);
}

void Group::SetParticipants(std::set<Device> participants) {
  Lock lock(mutex_);
  for (const auto& entry : forward_calls_) first_number_ = std::max(first_number_, entry.second);
  for (auto& entry : forward_calls_) entry.second = first_number_;
  participants_ = participants.empty()
                      ? nullptr
                      : std::make_shared<const std::set<Device>>(std::move(participants));
}

double Group::WaitSeconds() const {
  Lock lock(mutex_);
  return wait_seconds_;
}

int64_t Group::BatchesBefore(const Ticket& ticket) const {
  Lock lock(mutex_);
  return batches_before_epoch_ + ticket.number;
}

int64_t Group::Batches() const {
  Lock lock(mutex_);
  int64_t calls = 0;
  for (const auto& entry : forward_calls_) calls = std::max(calls, entry.second);
  return batches_before_epoch_ + calls;
}

void Group::SetBatches(int64_t batches) {
  Lock lock(mutex_);
  int64_t calls = 0;
  for (const auto& entry : forward_calls_) calls = std::max(calls, entry.second);
  batches_before_epoch_ = batches - calls;
}

void Group::Fail(const std::string& text) {
  Lock lock(mutex_);
  // Other processes can only notice what is begun.
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
  StartEpochLocked();
  failure_.clear();
  changed_.NotifyAll();
}

void Group::FailAndThrow(const std::string& text) {
  if (failure_.empty()) failure_ = text;
  if (processes_ != nullptr) processes_->Fail(failure_);
  changed_.NotifyAll();
  throw Error(text);
}

void Group::StartEpochLocked() {
  batches_before_epoch_ += FinishedCallsLocked();
  calls_before_epoch_ += FinishedCallsLocked();
  ++epoch_;
  rounds_.clear();
  forward_calls_.clear();
  first_number_ = 0;
}

// A round that some device never reached was not reduced.
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

bool Group::AnyoneWaitsLocked() const {
  return std::any_of(rounds_.begin(), rounds_.end(),
                     [](const std::pair<const RoundKey, std::shared_ptr<Round>>& entry) {
                       return entry.second->result == nullptr;
                     });
}

}  // namespace syncbn
