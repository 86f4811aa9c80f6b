// An exchange's life in its order: devices arrive and wait; parts of other ranks come; when all are
// here, they are reduced and answered. Failures and leaving follow.
#include "exchange/table.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <new>

#include "core/error.h"
#include "core/program.h"
#include "exchange/report.h"
#include "exchange/wait.h"

namespace syncbn {
namespace {

constexpr std::chrono::seconds kNotice{10};  // a longer wait prints its reason
constexpr double kEndSeconds = 2;     // limits how long a transport delivers the last messages
constexpr double kCloseSeconds = 30;  // limits how long others may take to leave

}  // namespace

// ---- a device arrives and waits ----------------------------------------------------------------

Numbers Table::Contribute(const Contribution& own, Ticket* ticket) {
  Lock lock(mutex_);
  Waiting waiting = Arrive(own, ticket, Clock::now());
  Exchange& exchange = *waiting.exchange;
  const bool carries = waiting.is_last && !exchange.ranks.empty();
  if (!exchange.over) {
    Pause pause(carries);
    while (true) {
      if (Serve(&lock)) pause.Restart();
      const Time now = Clock::now();
      if (IsOver(&lock, &waiting, now)) break;
      const Time until = now < waiting.notice ? waiting.notice : waiting.deadline;
      waiting.deadline += pause(&lock, exchange.over, &exchange.changed,
                                now < until ? until : now + std::chrono::milliseconds(10));
    }
    if (own.members != nullptr) {
      own.members->wait_seconds[own.device] += ToSeconds(Clock::now() - waiting.start);
    }
  }
  if (!exchange.error.empty()) throw Error(exchange.error);
  // A large message goes out only while the sender looks; its receiver is looking already.
  if (carries) {
    ServeUntil(&lock, ToSeconds(waiting.deadline - Clock::now()), [&] { return !peers_.Busy(); });
  }
  return exchange.result;
}

Waiting Table::Arrive(const Contribution& own, Ticket* ticket, Time now) {
  Members* const members = own.members;
  Key key;
  key.layer = own.shared_name;
  key.phase = own.phase;
  key.repeat = own.repeat;
  const std::vector<int> ranks = peers_.RanksOf(own.ranks, key);
  key.is_local = ranks.empty();
  if (key.is_local && members != nullptr) key.layer = members->layer;
  if (!failure_.empty()) throw Error(EarlierFailureReport(key, own.device, failure_));
  if (!key.is_local && peers_.has_left()) {
    throw Error(
        Concat(key.Title(), ": called after ", kShutdown, ", or while MPI or the program ends"));
  }
  if (members != nullptr && members->resets != resets_) {
    members->Restart();
    members->resets = resets_;
  }
  const bool is_old = own.phase == Phase::kBackward && ticket->generation != members->generation();
  if (is_old && !members->HasMoved(own.device)) {
    throw Error(EarlierFailureReport(key, own.device, kWasReset));
  }
  const std::set<Device>* expected = own.expected;
  size_t devices = own.devices;
  try {
    if (members == nullptr) {
      key.call = CallsOf(key).next++;
    } else {
      if (is_old) {
        throw Error(TooManyDevicesReport(members->layer, own.device, members->Devices(), devices));
      }
      if (own.phase == Phase::kForward) *ticket = Enter(own, key);
      key.call = ticket->number;
      if (ticket->participants) expected = ticket->participants.get();
      if (ticket->participants) devices = expected->size();
    }
    const Place place{peers_.rank(), own.device};
    const Shared exchange = Find(key, {place, own.signature, ranks, devices, own.shape});
    if (exchange->sent || !exchange->parts.emplace(place, Part{own.numbers, own.shape}).second) {
      throw Error(TwiceReport(key, own.device));
    }
    if (++exchange->arrived == 1) {
      exchange->members = members;
      exchange->devices = devices;
      exchange->first = place;
      exchange->start = now;
    }
    const bool is_last = exchange->AllDevicesAreHere();
    if (is_last && own.phase != Phase::kBackward) Complete(own, exchange);
    Advance(exchange);
    const Duration timeout = ToDuration(own.timeout_seconds);
    return {exchange,
            &own,
            expected,
            is_last,
            now,
            now + timeout,
            now + std::min<Duration>(timeout, kNotice)};
  } catch (const Error& error) {
    FailLocked(error.what(), !key.is_local);
    throw;
  }
}

Ticket Table::Enter(const Contribution& own, const Key& key) {
  const bool is_busy = !own.members->Has(own.device) &&
                       std::any_of(exchanges_.begin(), exchanges_.end(), [&](const auto& entry) {
                         return entry.second->members == own.members;
                       });
  return own.members->Enter(own.device, own.devices, is_busy, &CallsOf(key).next);
}

// Return the exchange of this key. Throws Error if it began on other terms.
Table::Shared Table::Find(const Key& key, const Terms& terms) {
  const auto found = exchanges_.find(key);
  const bool is_new = found == exchanges_.end();
  const bool is_over = is_new && terms.devices == 0 && key.phase != Phase::kBackward &&
                       key.call < CallsOf(key).complete;
  if (is_new && !is_over) {
    const auto exchange = std::make_shared<Exchange>();
    exchange->key = key;
    exchange->signature = terms.signature;
    exchange->ranks = terms.ranks;
    exchange->first = terms.place;
    if (!terms.ranks.empty()) exchange->position = PositionOf(peers_.rank(), terms.ranks);
    return exchanges_[key] = exchange;
  }
  const Shared& exchange = is_over ? CallsOf(key).latest : found->second;
  const bool same_devices =
      terms.devices == 0 || exchange->devices == 0 || exchange->devices == terms.devices;
  if (exchange->signature == terms.signature && exchange->ranks == terms.ranks && same_devices) {
    if (is_over) Refuse();
    return exchange;
  }
  const auto part = exchange->parts.find(exchange->first);
  throw Error(DisagreementReport(
      key,
      {exchange->first, exchange->signature, exchange->ranks, exchange->devices,
       part == exchange->parts.end() ? std::vector<int64_t>() : part->second.shape},
      terms));
}

// All devices of this rank have made a call.
void Table::Complete(const Contribution& own, const Shared& exchange) {
  if (own.members != nullptr) own.members->Complete(own.device);
  if (exchange->key.is_local) return;
  Calls& calls = CallsOf(exchange->key);
  calls.complete = exchange->key.call + 1;
  calls.latest = exchange;
}

// Return true if the wait has ended. It ends here when its time is over.
bool Table::IsOver(Lock* lock, Waiting* waiting, Time now) {
  const Exchange& exchange = *waiting->exchange;
  // The last device waits for other ranks, and the others wait for that one.
  const auto is_late = [&](Time since) {
    const bool waits = waiting->is_last || !exchange.AllDevicesAreHere();
    return !exchange.over && waits && now >= since + Patience(exchange);
  };
  const bool gives_notice = is_late(waiting->notice) && !is_late(waiting->deadline) &&
                            !exchange.AllDevicesAreHere() && !notice_given_;
  if (!gives_notice && !is_late(waiting->deadline)) return exchange.over;
  lock->unlock();
  const std::string where = WhereProgramStands();
  lock->lock();
  if (!is_late(gives_notice ? waiting->notice : waiting->deadline)) return exchange.over;
  const std::string text = MissingReport(*waiting, ToSeconds(now - waiting->start), where);
  if (gives_notice) {
    notice_given_ = true;
    std::fprintf(stderr, "gluon_syncbn raises this error after %g s:\n%s\n",
                 waiting->own->timeout_seconds, text.c_str());
    return false;
  }
  FailLocked(text, !exchange.key.is_local);
  return true;
}

// A rank waits longer where another rank can name who is missing.
Duration Table::Patience(const Exchange& exchange) const {
  const Position& position = exchange.position;
  if (exchange.sent) return std::chrono::seconds(position.height + position.depth - 1);
  int levels = position.height;
  for (const Subtree& child : exchange.Missing()) levels = std::min(levels, child.levels);
  return std::chrono::seconds(exchange.AllDevicesAreHere() ? levels : 0);
}

std::string Table::MissingReport(const Waiting& waiting, double seconds,
                                 const std::string& where) const {
  const Exchange& exchange = *waiting.exchange;
  if (!exchange.AllDevicesAreHere()) {
    const bool are_expected =
        waiting.expected != nullptr && waiting.expected->size() == exchange.devices;
    for (const auto& [place, part] : exchange.parts) {
      if (are_expected && place.rank == peers_.rank() && !waiting.expected->count(place.device)) {
        return TooManyDevicesReport(exchange.members->layer, place.device, *waiting.expected,
                                    exchange.devices);
      }
    }
    const std::set<Device> known = are_expected ? *waiting.expected : exchange.members->Devices();
    return DevicesMissingReport(exchange, peers_.rank(), known, seconds, where);
  }
  return RanksMissingReport(
      exchange, peers_.rank(), [this](int rank) { return StateOf(rank); }, seconds, where);
}

std::string Table::StateOf(int rank) const {
  for (const auto& [key, exchange] : exchanges_) {
    if (exchange->parts.count({rank})) return "which waits in " + key.Title();
  }
  return peers_.LatestOf(rank);
}

// ---- parts of other ranks, and the result ------------------------------------------------------

// Carry messages. Return false if none has arrived.
bool Table::Serve(Lock* lock) {
  if (!peers_.IsConnected()) return false;
  bool any = false;
  try {
    Message message;
    for (int from = 0; peers_.Receive(&from, &message); any = true) {
      std::string where;
      if (message.kind == MessageKind::kFail && failure_.empty()) {
        lock->unlock();
        where = WhereProgramStands();
        lock->lock();
      }
      Handle(from, std::move(message), where);
    }
  } catch (const std::exception& error) {
    FailLocked(error.what(), true);
  }
  return any;
}

void Table::Handle(int from, Message message, const std::string& where) {
  if (message.kind == MessageKind::kFail) {
    if (failure_.empty()) failure_ = RankFailedReport(from, message.text, where);
    failed_for_good_ = true;
    EndWhere(failure_, [](const Exchange&) { return true; });
    return;
  }
  if (message.kind == MessageKind::kLeave) {
    for (const auto& entry : exchanges_) CheckLeft(*entry.second);
    return;
  }
  if (failed_for_good_ || peers_.has_left()) return;
  if (message.kind == MessageKind::kPart) {
    const Shared exchange = Find(message.key, {{from}, message.signature, message.ranks, 0, {}});
    CheckPart(*exchange, from);
    exchange->parts[{from}].numbers = std::move(message.numbers);
    return Advance(exchange);
  }
  const auto found = exchanges_.find(message.key);
  CheckResult(found == exchanges_.end() ? nullptr : found->second.get(), from, message);
  Finish(found->second, std::move(message.numbers));
}

// Reduce and send the result on if all parts are here.
void Table::Advance(const Shared& exchange) {
  const Position& position = exchange->position;
  const size_t awaited = exchange->devices + position.children.size();
  if (!exchange->AllDevicesAreHere() || exchange->parts.size() < awaited) {
    return CheckLeft(*exchange);
  }
  Numbers reduced = exchange->Reduce();
  if (position.parent < 0) return Finish(exchange, std::move(reduced));
  exchange->sent = reduced.size();
  peers_.Send(position.parent, {MessageKind::kPart, exchange->key, exchange->signature,
                                exchange->ranks, std::move(reduced)});
  CheckLeft(*exchange);
}

void Table::Finish(const Shared& exchange, Numbers result) {
  Message answer;
  answer.kind = MessageKind::kResult;
  answer.key = exchange->key;
  answer.numbers = result;
  for (const Subtree& child : exchange->position.children) peers_.Send(child.rank, answer);
  exchange->result = std::move(result);
  End(exchange, "");
}

void Table::End(const Shared& exchange, const std::string& error) {
  exchange->error = error;
  exchange->over = true;
  exchange->changed.notify_all();
  exchanges_.erase(exchange->key);
}

template <typename Predicate>
void Table::EndWhere(const std::string& reason, const Predicate& ends) {
  const std::map<Key, Shared> exchanges = exchanges_;
  for (const auto& [key, exchange] : exchanges) {
    if (ends(*exchange)) End(exchange, EndReport(key, reason));
  }
}

// ---- failure -----------------------------------------------------------------------------------

void Table::Fail(const std::string& text, bool tell_ranks) {
  Lock lock(mutex_);
  if (Members::alive > 0 || peers_.IsConnected()) FailLocked(text, tell_ranks);
}

void Table::FailLocked(const std::string& text, bool tell_ranks) {
  for (const auto& [key, exchange] : exchanges_) {
    tell_ranks = tell_ranks || (!key.is_local && exchange->arrived > 0);
  }
  if (failure_.empty()) failure_ = text;
  if (tell_ranks && peers_.IsConnected() && !peers_.has_left() && !failed_for_good_) {
    failed_for_good_ = true;
    Message message;
    message.kind = MessageKind::kFail;
    message.text = failure_;
    peers_.Tell(message);
  }
  EndWhere(failure_, [&](const Exchange& e) { return failed_for_good_ || e.key.is_local; });
}

std::string Table::Failure() {
  Lock lock(mutex_);
  Serve(&lock);
  return failure_;
}

void Table::Reset() {
  Lock lock(mutex_);
  notice_given_ = false;
  ++resets_;
  if (!failed_for_good_) failure_.clear();
  EndWhere("the layer was reset while a device waited in it",
           [](const Exchange& exchange) { return exchange.arrived > 0; });
  for (auto& [key, calls] : calls_) {
    if (!key.is_local) calls.next = calls.complete;  // other ranks have not begun the others
  }
}

void Table::Restart(Members* members) {
  Lock lock(mutex_);
  members->Restart();
}

void Table::SetParticipants(Members* members, std::set<Device> participants) {
  Lock lock(mutex_);
  members->SetParticipants(std::move(participants));
}

double Table::WaitSeconds(const Members& members, const Device& device) {
  Lock lock(mutex_);
  const auto found = members.wait_seconds.find(device);
  return found == members.wait_seconds.end() ? 0 : found->second;
}

double Table::LongestWait() {
  Lock lock(mutex_);
  const Time now = Clock::now();
  Time oldest = now;
  for (const auto& entry : exchanges_) {
    if (entry.second->arrived > 0) oldest = std::min(oldest, entry.second->start);
  }
  return failure_.empty() ? ToSeconds(now - oldest) : 0;
}

// ---- the other processes -----------------------------------------------------------------------

Table& Table::Get() {
  static Table* table = new Table;
  return *table;
}

void Table::Connect(std::unique_ptr<Transport> transport) {
  Lock lock(mutex_);
  transport->OnClose([this] { return Disconnect(0, kCloseSeconds); });
  peers_.Connect(std::move(transport));
  // Another thread may have held the mutex at the fork.
  pthread_atfork(nullptr, nullptr, [] {
    Get().peers_.SetForked();
    new (&Get().mutex_) std::mutex;
  });
}

// A rank that has left sends no part, and no result.
void Table::CheckLeft(const Exchange& exchange) {
  if (exchange.key.is_local || exchange.arrived == 0) return;
  std::vector<int> needed;
  if (!exchange.sent) {
    for (const Subtree& child : exchange.Missing()) needed.push_back(child.rank);
  }
  if (exchange.position.parent >= 0) needed.push_back(exchange.position.parent);
  for (const int rank : needed) {
    if (peers_.HasLeft(rank)) throw Error(RankLeftReport(exchange.key, rank));
  }
}

void Table::Leave() {
  Lock lock(mutex_);
  if (peers_.closed()) return;
  peers_.Leave();
  EndWhere("the program ends", [](const Exchange& exchange) { return !exchange.key.is_local; });
}

bool Table::Disconnect(double seconds, double seconds_after_failure) {
  Leave();
  Lock lock(mutex_);
  if (peers_.is_forked()) return true;
  Serve(&lock);
  ServeUntil(&lock, failed_for_good_ ? seconds_after_failure : seconds,
             [&] { return peers_.AllHaveLeft(); });
  ServeUntil(&lock, kEndSeconds, [&] { return !peers_.Busy(); });
  peers_.Close();
  return !failed_for_good_ || peers_.AllHaveLeft();
}

template <typename Predicate>
void Table::ServeUntil(Lock* lock, double seconds, const Predicate& over) {
  const Time deadline = Clock::now() + ToDuration(seconds);
  std::condition_variable nobody;
  const std::atomic<bool> never{false};
  for (Pause pause(true); !peers_.closed() && !over() && Clock::now() < deadline;) {
    if (Serve(lock)) {
      pause.Restart();
    } else {
      pause(lock, never, &nobody, deadline);
    }
  }
}

}  // namespace syncbn
