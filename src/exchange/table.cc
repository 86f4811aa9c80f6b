// In the order of an exchange's life: devices arrive and wait; parts of other ranks come; when all
// are here, they are reduced and answered. Then all other ends, and leaving.
#include "exchange/table.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <new>
#include <numeric>
#include <optional>

#include "core/error.h"
#include "core/program.h"
#include "exchange/report.h"
#include "exchange/wait.h"

namespace syncbn {
namespace {

constexpr std::chrono::seconds kNotice{10};  // before a wait says what it waits for
constexpr double kEndSeconds = 2;            // for a transport to deliver the last messages
constexpr double kCloseSeconds = 30;         // for others to leave before they are ended

// A fork does not copy the connection to the other processes.
std::atomic<bool> forked{false};

}  // namespace

// ---- the devices of a layer --------------------------------------------------------------------

std::set<Device> Members::Devices() const {
  std::set<Device> devices;
  for (const auto& entry : next_) devices.insert(entry.first);
  return devices;
}

void Members::Level() {
  for (const auto& entry : next_) start_ = std::max(start_, entry.second);
  for (auto& entry : next_) entry.second = start_;
  numbers_.clear();
}

void Members::Restart() {
  Level();
  next_.clear();
  ++generation_;
}

void Table::SetParticipants(Members* members, std::set<Device> participants) {
  Lock lock(mutex_);
  members->Level();
  members->participants_ = nullptr;
  if (participants.empty()) return;
  members->participants_ = std::make_shared<const std::set<Device>>(std::move(participants));
}

// Numbers a forward call. One device too many means that either the net has moved to other devices,
// and the old ones no longer call; or more devices are in use than the layer is for. A former
// member must not take a new one's place: its batch would be reduced with their older one.
void Table::Enter(const Contribution& own, Key* key, Ticket* ticket) {
  Members& members = *own.members;
  const Participants& participants = members.participants_;
  if (participants && !participants->count(own.device)) {
    throw Error(NoParticipantReport(members.layer, own.device, *participants));
  }
  if (!members.next_.count(own.device)) {
    const std::set<Device> others = members.Devices();
    const bool is_full = others.size() >= own.devices;
    const bool any_waits =
        std::any_of(exchanges_.begin(), exchanges_.end(),
                    [&](const auto& entry) { return entry.second->members == &members; });
    if (members.former_.count(own.device) || (is_full && any_waits)) {
      throw Error(TooManyDevicesReport(members.layer, own.device, others, own.devices));
    }
    if (is_full) {
      members.former_.insert(others.begin(), others.end());
      members.Restart();
    }
  }
  int64_t& next = members.next_.emplace(own.device, members.start_).first->second;
  Calls& calls = CallsOf(*key);
  const auto [number, is_first] = members.numbers_.emplace(next++, calls.next);
  calls.next += is_first;
  key->call = number->second;
  *ticket = {key->call, members.generation_, participants};
}

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
      own.members->wait_seconds_[own.device] += ToSeconds(Clock::now() - waiting.start);
    }
  }
  if (!exchange.error.empty()) throw Error(exchange.error);
  // A large message goes out only while the sender looks; its receiver is looking already.
  if (carries) {
    ServeUntil(&lock, ToSeconds(waiting.deadline - Clock::now()), [&] { return !peers_->Busy(); });
  }
  return exchange.result;
}

Waiting Table::Arrive(const Contribution& own, Ticket* ticket, Time now) {
  const std::vector<int> ranks = RanksOf(own);
  Key key;
  key.is_local = ranks.empty();
  key.layer = key.is_local && own.members != nullptr ? own.members->layer : own.shared_name;
  key.phase = own.phase;
  key.repeat = own.repeat;
  if (!failure_.empty()) throw Error(EarlierFailureReport(key, own.device, failure_));
  if (!key.is_local && peers_->has_left()) {
    throw Error(Concat(key.Title(), ": called after ", kShutdown,
                       ", or while MPI or the program ends"));
  }
  if (own.members != nullptr) Follow(own.members);
  if (own.phase == Phase::kBackward && ticket->generation != own.members->generation_ &&
      !own.members->former_.count(own.device)) {
    throw Error(EarlierFailureReport(key, own.device, kWasReset));
  }
  const std::set<Device>* expected = own.expected;
  size_t devices = own.devices;
  try {
    if (own.members == nullptr) {
      key.call = CallsOf(key).next++;
    } else {
      if (own.phase == Phase::kForward) Enter(own, &key, ticket);
      if (ticket->generation != own.members->generation_) {
        throw Error(TooManyDevicesReport(own.members->layer, own.device,
                                         own.members->Devices(), own.devices));
      }
      key.call = ticket->number;
      if (ticket->participants) expected = ticket->participants.get();
      if (ticket->participants) devices = expected->size();
    }
    const Place place{OwnRank(), own.device};
    const Shared exchange = Find(key, {place, own.signature, ranks, devices, own.shape});
    if (exchange->sent || !exchange->parts.emplace(place, Part{own.numbers, own.shape}).second) {
      throw Error(TwiceReport(key, own.device));
    }
    exchange->members = own.members;
    exchange->devices = devices;
    if (++exchange->arrived == 1) exchange->start = now;
    const bool is_last = exchange->AllDevicesAreHere();
    if (is_last && own.phase != Phase::kBackward) Complete(own, exchange);
    Advance(exchange);
    const Duration timeout = ToDuration(own.timeout_seconds);
    return {exchange, &own, expected, is_last, now, now + timeout,
            now + std::min<Duration>(timeout, kNotice)};
  } catch (const Error& error) {
    FailLocked(error.what(), !key.is_local);
    throw;
  }
}

// The exchange of this key. Throws Error if another place has agreed on another one.
Table::Shared Table::Find(const Key& key, const Terms& terms) {
  const auto found = exchanges_.find(key);
  if (found == exchanges_.end()) {
    const auto calls = calls_.find(CountedBy(key));
    const bool is_over = terms.devices == 0 && key.phase != Phase::kBackward &&
                         calls != calls_.end() && key.call < calls->second.complete;
    if (is_over) {
      const Exchange& latest = *calls->second.latest;
      if (latest.signature == terms.signature && latest.ranks == terms.ranks) Refuse();
      throw Error(DisagreementReport(
          key, {{OwnRank()}, latest.signature, latest.ranks, 0, {}}, terms));
    }
    const auto exchange = std::make_shared<Exchange>();
    exchange->key = key;
    exchange->signature = terms.signature;
    exchange->ranks = terms.ranks;
    exchange->first = terms.place;
    if (!terms.ranks.empty()) exchange->position = PositionOf(OwnRank(), terms.ranks);
    return exchanges_[key] = exchange;
  }
  const Exchange& exchange = *found->second;
  const bool same_devices =
      terms.devices == 0 || exchange.devices == 0 || exchange.devices == terms.devices;
  if (exchange.signature == terms.signature && exchange.ranks == terms.ranks && same_devices) {
    return found->second;
  }
  // A device differs from another one, if there is one.
  const auto device = exchange.parts.lower_bound({OwnRank()});
  const bool of_devices = terms.devices > 0 && device != exchange.parts.end() &&
                          device->first.rank == OwnRank();
  const Place& first = of_devices ? device->first : exchange.first;
  throw Error(DisagreementReport(key,
                                 {first, exchange.signature, exchange.ranks, exchange.devices,
                                  of_devices ? device->second.shape : std::vector<int64_t>()},
                                 terms));
}

// Notes that all devices of this rank have made a call.
void Table::Complete(const Contribution& own, const Shared& exchange) {
  if (own.members != nullptr) own.members->numbers_.erase(own.members->next_[own.device] - 1);
  if (exchange->key.is_local) return;
  Calls& calls = CallsOf(exchange->key);
  calls.complete = exchange->key.call + 1;
  calls.latest = exchange;
}

// Ends the wait where its time is over.
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

// Those who know better who is missing speak first.
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
      const bool is_other = are_expected && place.rank == OwnRank() &&
                            !waiting.expected->count(place.device);
      if (!is_other) continue;
      return TooManyDevicesReport(exchange.members->layer, place.device, *waiting.expected,
                                  exchange.devices);
    }
    const std::set<Device> known =
        are_expected ? *waiting.expected : exchange.members->Devices();
    return DevicesMissingReport(exchange, OwnRank(), known, seconds, where);
  }
  if (exchange.sent) {
    return RanksMissingReport(exchange, {OwnRank()},
                              {Concat("rank ", exchange.position.parent, ", which does not answer: "
                                      "it computes, has left the loop or has died")},
                              seconds, where);
  }
  std::vector<int> present = exchange.ranks;
  std::vector<std::string> missing;
  for (const Subtree& child : exchange.Missing()) {
    const auto begin = std::lower_bound(present.begin(), present.end(), child.rank);
    present.erase(begin, begin + child.size);
    missing.push_back(WhatIsKnownOf(child));
  }
  return RanksMissingReport(exchange, present, missing, seconds, where);
}

std::string Table::WhatIsKnownOf(const Subtree& child) const {
  std::string known = peers_->LatestOf(child.rank);
  for (const auto& [key, exchange] : exchanges_) {
    if (exchange->parts.count({child.rank})) known = "which waits in " + key.Title();
  }
  const std::string others =
      child.size == 1 ? "" : Concat(" (it sends for ", child.size, " ranks)");
  return Concat("rank ", child.rank, ", ", known, others);
}

// ---- parts of other ranks, and the result ------------------------------------------------------

// Carries messages; false if none has arrived.
bool Table::Serve(Lock* lock) {
  if (!IsConnected()) return false;
  bool any = false;
  try {
    Message message;
    for (int from = 0; peers_->Receive(&from, &message); any = true) {
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
  if (failed_for_good_ || peers_->has_left()) return;
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

// Reduces and passes on if all parts are here.
void Table::Advance(const Shared& exchange) {
  const Position& position = exchange->position;
  const size_t awaited = exchange->devices + position.children.size();
  if (!exchange->AllDevicesAreHere() || exchange->parts.size() < awaited) {
    return CheckLeft(*exchange);
  }
  Numbers reduced = exchange->Reduce();
  if (position.parent < 0) return Finish(exchange, std::move(reduced));
  exchange->sent = reduced.size();
  peers_->Send(position.parent, {MessageKind::kPart, exchange->key, exchange->signature,
                                 exchange->ranks, std::move(reduced)});
  CheckLeft(*exchange);
}

void Table::Finish(const Shared& exchange, Numbers result) {
  for (const Subtree& child : exchange->position.children) {
    peers_->Send(child.rank, {MessageKind::kResult, exchange->key, {}, {}, result});
  }
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
  if (Members::alive > 0 || IsConnected()) FailLocked(text, tell_ranks);
}

void Table::FailLocked(const std::string& text, bool tell_ranks) {
  for (const auto& [key, exchange] : exchanges_) {
    tell_ranks = tell_ranks || (!key.is_local && exchange->arrived > 0);
  }
  if (failure_.empty()) failure_ = text;
  if (tell_ranks && IsConnected() && !peers_->has_left() && !failed_for_good_) {
    failed_for_good_ = true;
    peers_->Tell({MessageKind::kFail, {}, {}, {}, {}, failure_});
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
  members->former_.clear();
}

void Table::Follow(Members* members) {
  if (members->resets_ == resets_) return;
  members->Restart();
  members->former_.clear();
  members->resets_ = resets_;
}

double Table::WaitSeconds(const Members& members, const Device& device) {
  Lock lock(mutex_);
  const auto found = members.wait_seconds_.find(device);
  return found == members.wait_seconds_.end() ? 0 : found->second;
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
  peers_ = std::make_unique<Peers>(std::move(transport));
  // Another thread may have held the mutex at the fork.
  pthread_atfork(nullptr, nullptr, [] {
    forked = true;
    new (&Get().mutex_) std::mutex;
  });
}

bool Table::IsConnected() const { return peers_ && peers_->size() > 1 && !forked; }

// The ranks that exchange, ascending; none for this process alone.
std::vector<int> Table::RanksOf(const Contribution& own) const {
  const std::vector<int>& ranks = own.ranks;
  if (ranks.size() == 1) return {};
  const auto fail = [&](const auto&... parts) {
    const std::string& layer = own.members != nullptr ? own.members->layer : own.shared_name;
    throw Error(Concat("SyncBatchNorm '", layer, "': ", parts...));
  };
  if (!peers_ && !ranks.empty()) {
    fail("its group has ", ranks.size(), " ranks, but ", kInit, " was not called in this process");
  }
  if (!peers_ || peers_->size() == 1) return {};
  if (forked) {
    throw Error(Concat(own.shared_name, ": called in a process that was forked from rank ",
                       peers_->rank(), "; only the process that called ", kInit, " synchronizes"));
  }
  if (ranks.empty()) {
    std::vector<int> all(static_cast<size_t>(peers_->size()));
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
  if (!std::binary_search(ranks.begin(), ranks.end(), peers_->rank()) ||
      ranks.back() >= peers_->size()) {
    fail("its group must hold rank ", peers_->rank(), " and ranks below ", peers_->size(),
         " only, got ranks up to ", ranks.back(), "; call gluon_syncbn.revert_sync_batchnorm "
         "before a net is exported");
  }
  return ranks;
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
    if (peers_->HasLeft(rank)) throw Error(RankLeftReport(exchange.key, rank));
  }
}

void Table::Leave() {
  Lock lock(mutex_);
  if (!peers_ || forked) return;
  peers_->Leave();
  EndWhere("the program ends", [](const Exchange& exchange) { return !exchange.key.is_local; });
}

bool Table::Disconnect(double seconds, double seconds_after_failure) {
  Leave();
  Lock lock(mutex_);
  if (!peers_ || forked) return true;
  Serve(&lock);
  ServeUntil(&lock, failed_for_good_ ? seconds_after_failure : seconds,
             [&] { return peers_->AllHaveLeft(); });
  ServeUntil(&lock, kEndSeconds, [&] { return !peers_->Busy(); });
  peers_->Close();
  return !failed_for_good_ || peers_->AllHaveLeft();
}

template <typename Predicate>
void Table::ServeUntil(Lock* lock, double seconds, const Predicate& over) {
  const Time deadline = Clock::now() + ToDuration(seconds);
  std::condition_variable nobody;
  const std::atomic<bool> never{false};
  for (Pause pause(true); !peers_->closed() && !over() && Clock::now() < deadline;) {
    if (Serve(lock)) {
      pause.Restart();
    } else {
      pause(lock, never, &nobody, deadline);
    }
  }
}

}  // namespace syncbn
