// How devices and ranks contribute to exchanges and wait. failures.cc ends the exchanges that fail.
#include "exchange/table.h"

#include <algorithm>
#include <cstdio>
#include <iomanip>

#include "core/error.h"
#include "core/program.h"
#include "exchange/report.h"

namespace syncbn {
namespace {

constexpr std::chrono::seconds kNotice{10};  // after this time a wait prints what it waits for

}  // namespace

// ---- a device arrives and waits ----------------------------------------------------------------

Waiting Table::Begin(Contribution&& own, Ticket* ticket) {
  Lock lock(mutex_);
  Waiting waiting = Arrive(std::move(own), ticket, Clock::now());
  if (waiting.exchange->over) waiting.members = nullptr;  // this device has not waited
  return waiting;
}

bool Table::IsReady(const Waiting& waiting, Duration limit) {
  const Exchange& exchange = *waiting.exchange;
  const bool carries_messages = waiting.is_last && !exchange.signature.ranks.empty();
  const Time end = Clock::now() + limit;
  while (true) {
    bool is_busy = false;
    if (carries_messages) {
      Lock lock(mutex_);
      Serve();
      is_busy = peers_.Busy();
    }
    if (exchange.over && !is_busy) return true;
    if (Clock::now() >= end) return false;
    std::this_thread::yield();  // another device's thread may need this processor
  }
}

Numbers Table::Await(Waiting waiting) {
  Lock lock(mutex_);
  Exchange& exchange = *waiting.exchange;
  const bool carries_messages = waiting.is_last && !exchange.signature.ranks.empty();
  if (!exchange.over) {
    Pause pause(carries_messages);
    while (true) {
      if (Serve()) pause.Restart();
      if (IsOver(&lock, waiting, Clock::now())) break;
      waiting.deadline += pause(&lock, exchange.over, &exchange.changed, waiting.deadline);
    }
  }
  if (waiting.members != nullptr) {
    waiting.members->wait_seconds[waiting.device] += ToSeconds(Clock::now() - waiting.start);
  }
  if (!exchange.error.empty()) throw Error(exchange.error);
  // MPI sends a large message only while this thread polls.
  if (carries_messages) {
    ServeUntil(&lock, waiting.deadline, [&] { return !peers_.Busy(); });
  }
  return exchange.result;
}

Waiting Table::Arrive(Contribution&& own, Ticket* ticket, Time now) {
  Members* const members = own.members;
  Key key{false, own.shared_name, own.phase};
  own.signature.ranks = peers_.RanksOf(std::move(own.signature.ranks), key);
  key.is_local = own.signature.ranks.empty();
  if (key.is_local && members != nullptr) key.layer = members->layer;
  if (!failure_.empty()) {
    // Other ranks wait for a layer's device that was queued before recover() or another error.
    if (!key.is_local && members != nullptr) FailLocked(failure_, true);
    throw Error(Concat(key.Title(), ": ", members == nullptr ? "" : own.device.Name() + " ",
                       "stopped because of an earlier error: ", failure_));
  }
  if (!key.is_local && peers_.has_left()) {
    throw Error(
        Concat(key.Title(), ": called after ", kShutdown, ", or while MPI or the program ends"));
  }
  if (members != nullptr && std::exchange(members->resets, resets_) != resets_) members->Forget();
  const bool is_old = own.phase == Phase::kBackward && ticket->generation != members->generation;
  if (is_old && !members->former.count(own.device)) {
    throw Error(Concat(key.Title(),
                       ": gluon_syncbn.recover() or a conversion of the net has invalidated the "
                       "forward call on ",
                       own.device.Name(), ". Run forward again."));
  }
  try {
    if (is_old) {
      throw Error(TooManyDevicesReport(members->layer, own.device, members->devices, own.devices));
    }
    if (own.phase == Phase::kForward) *ticket = Enter(own, key);
    key.call = members == nullptr ? NextCall(key)++ : ticket->number;
    const Place place{peers_.rank(), own.device};
    const Shared exchange = Find(key, {place, own.signature, own.devices});
    exchange->parts[place] = {std::move(own.numbers), std::move(own.shape)};
    if (++exchange->arrived == 1) {
      exchange->members = members;
      exchange->devices = own.devices;
      exchange->first = place;
      exchange->start = now;
    }
    const bool is_last = exchange->AllDevicesAreHere();
    Advance(exchange);
    const Time deadline = now + ToDuration(own.timeout_seconds);
    return {exchange, own.expected, is_last, now, deadline, members, own.device};
  } catch (const Error& error) {
    FailLocked(error.what(), !key.is_local);
    throw;
  }
}

// Returns the ticket of a forward call. If one more device than `own.devices` calls the layer,
// either the net has moved, or this number is too small. The second case ends in an Error, at the
// latest when one of the earlier devices calls again.
Ticket Table::Enter(const Contribution& own, const Key& key) {
  Members& members = *own.members;
  if (!members.devices.count(own.device)) {
    const bool is_full = members.devices.size() >= own.devices;
    const bool is_busy = std::any_of(exchanges_.begin(), exchanges_.end(), [&](const auto& entry) {
      return entry.second->members == &members;
    });
    if (members.former.count(own.device) || (is_full && is_busy)) {
      throw Error(TooManyDevicesReport(members.layer, own.device, members.devices, own.devices));
    }
    if (is_full) {
      members.former.insert(members.devices.begin(), members.devices.end());
      members.devices.clear();
      ++members.generation;
    }
    members.devices.insert(own.device);
  }
  for (const auto& [pending, exchange] : exchanges_) {  // the earliest call first
    if (exchange->members == &members && pending.phase == Phase::kForward &&
        !exchange->AllDevicesAreHere() && !exchange->parts.count({peers_.rank(), own.device})) {
      return {pending.call, members.generation};
    }
  }
  return {NextCall(key)++, members.generation};
}

// Returns the pending exchange of this key, or begins it. Throws Error if the exchange has other
// terms, or if the terms are of a child rank, without which this rank has completed the forward
// call or the named gather.
Table::Shared Table::Find(const Key& key, const Terms& terms) {
  const auto found = exchanges_.find(key);
  if (found == exchanges_.end()) {
    if (terms.devices == 0 && key.phase != Phase::kBackward && key.call < NextCall(key)) {
      throw Error(Concat(key.Title(), ": rank ", terms.place.rank, " synchronizes ranks ",
                         JoinNumbers(terms.signature.ranks), ", but rank ", peers_.rank(),
                         " has completed this call without it. Use equal groups on all ranks."));
    }
    const auto exchange = std::make_shared<Exchange>();
    exchange->key = key;
    exchange->signature = terms.signature;
    exchange->first = terms.place;
    exchange->position = PositionOf(peers_.rank(), terms.signature.ranks, arity_);
    return exchanges_[key] = exchange;
  }
  const Shared& exchange = found->second;
  const bool same_devices =
      terms.devices == 0 || exchange->devices == 0 || exchange->devices == terms.devices;
  if (exchange->signature == terms.signature && same_devices) return exchange;
  throw Error(
      DisagreementReport(key, {exchange->first, exchange->signature, exchange->devices}, terms));
}

// Returns true if the wait is over. Fails the exchange if the wait is late.
bool Table::IsOver(Lock* lock, const Waiting& waiting, Time now) {
  const Exchange& exchange = *waiting.exchange;
  const auto is_late = [&](Time deadline) {
    // When all devices have arrived, only the last one reports that other ranks are late.
    const bool reports = waiting.is_last || !exchange.AllDevicesAreHere();
    return !exchange.over && reports && now >= deadline && now >= deadline + Patience(exchange);
  };
  const bool gives_notice = !notice_given_ && !exchange.AllDevicesAreHere() &&
                            !is_late(waiting.deadline) && is_late(waiting.start + kNotice);
  if (!gives_notice && !is_late(waiting.deadline)) return exchange.over;
  lock->unlock();
  const std::string where = WhereProgramStands();
  lock->lock();
  if (!is_late(gives_notice ? waiting.start + kNotice : waiting.deadline)) return exchange.over;
  const std::string text =
      MissingReport(exchange, waiting.expected, ToSeconds(now - waiting.start), &where);
  if (gives_notice) {
    notice_given_ = true;
    std::fprintf(stderr, "gluon_syncbn raises this error after %g s:\n%s\n",
                 ToSeconds(waiting.deadline - waiting.start), text.c_str());
    return false;
  }
  FailLocked(text, !exchange.key.is_local);
  return true;
}

// Returns how long a rank waits after its deadline, so that a rank that can name the missing one
// reports first. Of the ranks that wait for a child, the lowest in the tree report first. Ranks
// that wait for an answer of their parent report later, the highest first.
Duration Table::Patience(const Exchange& exchange) const {
  const Position& position = exchange.position;
  if (exchange.sent) return std::chrono::seconds(position.height + position.depth - 1);
  const std::vector<Subtree> missing = exchange.Missing();
  const bool is_known = !exchange.AllDevicesAreHere() ||
                        std::any_of(missing.begin(), missing.end(),
                                    [](const Subtree& child) { return child.size == 1; });
  return std::chrono::seconds(is_known ? 0 : position.height - 1 - position.depth);
}

std::string Table::MissingReport(const Exchange& exchange, const std::set<Device>* expected,
                                 double seconds, const std::string* where) const {
  if (!exchange.AllDevicesAreHere()) {
    const bool knows_all = expected != nullptr && expected->size() == exchange.devices;
    for (const auto& [place, part] : exchange.parts) {
      if (knows_all && place.rank == peers_.rank() && !expected->count(place.device)) {
        return TooManyDevicesReport(exchange.members->layer, place.device, *expected,
                                    exchange.devices);
      }
    }
    const std::set<Device> known = knows_all ? *expected : exchange.members->devices;
    return DevicesMissingReport(exchange, peers_.rank(), known, seconds, where);
  }
  return RanksMissingReport(exchange, peers_.rank(), latest_, seconds, where);
}

// ---- parts of other ranks, and the result ------------------------------------------------------

// Handles all messages that have arrived. Returns false if there was none.
bool Table::Serve() {
  bool any = false;
  try {
    Message message;
    for (int from = 0; peers_.Receive(&from, &message); any = true) {
      Handle(from, std::move(message));
    }
  } catch (const std::exception& error) {
    FailLocked(error.what(), true);
  }
  return any;
}

// Handles messages until `over` returns true, at most until the deadline.
void Table::ServeUntil(Lock* lock, Time deadline, const std::function<bool()>& over) {
  std::condition_variable nothing;
  const std::atomic<bool> never{false};
  for (Pause pause(true); !peers_.closed() && !over() && Clock::now() < deadline;) {
    if (Serve()) {
      pause.Restart();
    } else {
      pause(lock, never, &nothing, deadline);
    }
  }
}

void Table::Handle(int from, Message&& message) {
  if (const auto* const fail = std::get_if<FailMessage>(&message)) {
    failed_for_good_ = true;  // the sender sends it to all ranks
    return FailLocked(Concat("ended because of an error on rank ", from, ": ", fail->text), false);
  }
  if (std::holds_alternative<LeaveMessage>(message)) {
    for (const auto& entry : exchanges_) CheckLeft(*entry.second);
    return;
  }
  if (failed_for_good_ || peers_.has_left()) return;
  if (auto* const part = std::get_if<PartMessage>(&message)) {
    latest_[from] = part->key;
    const Shared exchange = Find(part->key, {{from}, part->signature, 0});
    CheckPart(*exchange, from);
    exchange->parts[{from}].numbers = std::move(part->numbers);
    return Advance(exchange);
  }
  auto& [key, numbers] = std::get<ResultMessage>(message);
  const auto found = exchanges_.find(key);
  const Shared exchange = found == exchanges_.end() ? nullptr : found->second;
  CheckResult(exchange.get(), from, numbers);
  Finish(exchange, std::move(numbers));
}

// Reduces the parts if all are here. The root then finishes the exchange. Other ranks send the
// reduced numbers to their parents.
void Table::Advance(const Shared& exchange) {
  const Position& position = exchange->position;
  const size_t awaited = exchange->devices + position.children.size();
  if (exchange->AllDevicesAreHere() && exchange->parts.size() == awaited) {
    Numbers reduced = exchange->Reduce();
    if (position.parent < 0) return Finish(exchange, std::move(reduced));
    exchange->sent = reduced.size();
    peers_.Send(position.parent,
                PartMessage{exchange->key, exchange->signature, std::move(reduced)});
  }
  CheckLeft(*exchange);
}

void Table::Finish(const Shared& exchange, Numbers result) {
  const std::vector<Subtree>& children = exchange->position.children;
  if (!children.empty()) {
    const Message answer = ResultMessage{exchange->key, result};
    for (const Subtree& child : children) peers_.Send(child.rank, answer);
  }
  exchange->result = std::move(result);
  End(exchange, "");
}

void Table::End(const Shared& exchange, const std::string& error) {
  if (keeps_history_ && exchange->members != nullptr) {
    std::vector<std::string>& latest = history_[exchange->key.layer];
    latest.push_back(Concat(exchange->key.phase == Phase::kForward ? "forward " : "backward ",
                            exchange->key.call, " took ", std::setprecision(2),
                            ToSeconds(Clock::now() - exchange->start), " s"));
    if (latest.size() > 10) latest.erase(latest.begin());
  }
  exchange->error = error;
  exchange->over = true;
  exchange->changed.notify_all();
  exchanges_.erase(exchange->key);
}

// ---- a layer's devices, and times of waits -----------------------------------------------------

Table& Table::Get() {
  static Table* table = new Table;
  return *table;
}

void Table::Restart(Members* members) {
  Lock lock(mutex_);
  members->Forget();
}

double Table::WaitSeconds(const Members& members, const Device& device) {
  Lock lock(mutex_);
  const auto found = members.wait_seconds.find(device);
  return found == members.wait_seconds.end() ? 0 : found->second;
}

double Table::LongestWait() {
  Lock lock(mutex_);
  Duration longest{};
  for (const auto& [key, exchange] : exchanges_) {
    if (exchange->arrived > 0) longest = std::max(longest, Clock::now() - exchange->start);
  }
  return failure_.empty() ? ToSeconds(longest) : 0;
}

std::string Table::Status() {
  const std::string where = WhereProgramStands();
  Lock lock(mutex_);
  std::string text = Concat("gluon_syncbn: pending exchanges: ", exchanges_.size());
  for (const auto& [key, exchange] : exchanges_) {
    const double seconds = ToSeconds(Clock::now() - exchange->start);
    text += "\n" + (exchange->arrived > 0 ? MissingReport(*exchange, nullptr, seconds, nullptr)
                                          : key.Title() + ": other ranks wait for this one.");
  }
  for (const auto& [layer, latest] : history_) text += Concat("\n", layer, ": ", Join(latest));
  return text + where;
}

}  // namespace syncbn
