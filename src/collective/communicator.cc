// Exchanges: beginning, carrying parts, ending. communicator_control.cc has the rest.
#include "collective/communicator.h"

#include <numeric>
#include <utility>

#include "collective/backoff.h"
#include "collective/process_report.h"
#include "core/error.h"

namespace syncbn {
namespace {

// In place of an exchange's step: begin, if you have joined.
constexpr int kInvitation = -1;

// More finished exchanges than any rank is ahead of another one.
constexpr size_t kRemembered = 64;

std::vector<int> AllRanks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::chrono::steady_clock::duration Seconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds));
}

}  // namespace

Bytes Communicator::AllReduce(Contribution contribution) {
  CheckNotForked(contribution.title);
  Lock lock(mutex_);
  CheckUsableLocked(contribution.title);
  if (contribution.ranks.empty()) contribution.ranks = AllRanks(size_);
  const std::string title = contribution.title;
  const double timeout = contribution.timeout_seconds;
  std::shared_ptr<Entry>& slot = exchanges_[contribution.key];
  if (!slot) slot = std::make_shared<Entry>();
  const std::shared_ptr<Entry> entry = slot;
  if (entry->exchange) throw Error(Concat(title, ": this rank came twice to one exchange"));
  ++taken_part_;
  last_title_ = title;
  const auto start = Clock::now();
  auto deadline = start + Seconds(timeout);
  BeginLocked(entry, std::move(contribution), false);
  bool extended = false;
  Backoff backoff;
  while (!entry->exchange->done()) {
    if (!failure_.empty()) {
      const bool own = failure_.compare(0, title.size(), title) == 0;
      throw Error(own ? failure_ : Concat(title, ": ", failure_));
    }
    if (closed_) CheckUsableLocked(title);
    if (ProgressLocked()) continue;
    if (Clock::now() >= deadline) {
      const std::chrono::duration<double> waited = Clock::now() - start;
      if (extended || FindMissingLocked(&lock, *entry, waited.count())) continue;
      // All have come, and parts are still under way.
      extended = true;
      deadline = Clock::now() + Seconds(timeout);
    }
    lock.unlock();
    backoff.Pause();
    lock.lock();
  }
  FinishLocked(entry);
  return std::move(entry->exchange->result());
}

void Communicator::FinishLocked(const std::shared_ptr<Entry>& entry) {
  const auto mine = exchanges_.find(entry->own.key);
  if (mine == exchanges_.end() || mine->second != entry) return;  // of an era that is over
  finished_.push_back(entry->own);
  if (finished_.size() > kRemembered) finished_.pop_front();
  exchanges_.erase(mine);
}

void Communicator::BeginLocked(const std::shared_ptr<Entry>& entry, Contribution own, bool empty) {
  Part part{empty, std::move(own.payload)};
  entry->own = std::move(own);
  entry->exchange.reset(
      new Exchange(entry->own.ranks, rank_, std::move(part), FindMerger(entry->own.merger)));
  std::vector<std::pair<int, Message>> early;
  early.swap(entry->early);
  for (auto& message : early) TakeLocked(entry.get(), message.first, std::move(message.second));
  AdvanceLocked(entry.get());
}

// This process has joined: it brings an empty part to whatever the others begin.
void Communicator::JoinInLocked(const std::shared_ptr<Entry>& entry) {
  const Message& message = entry->early.front().second;
  Contribution own;
  own.key = message.key;
  own.title = message.title;
  own.contract = message.contract;
  own.merger = message.merger;
  own.ranks.assign(message.ranks.begin(), message.ranks.end());
  if (own.ranks.empty()) own.ranks = AllRanks(size_);
  BeginLocked(entry, std::move(own), true);
  if (entry->exchange->done()) FinishLocked(entry);
}

void Communicator::HandlePartLocked(int from, Message message) {
  if (!exchanges_.count(message.key)) {
    for (const Contribution& finished : finished_) {
      if (finished.key != message.key) continue;
      // An invitation can come too late; a part cannot.
      if (message.step != kInvitation) {
        if (message.ranks.empty()) message.ranks = AllRanks(size_);
        FailLocked(ContractsDifferReport(finished, rank_, from, message));
      }
      return;
    }
    exchanges_[message.key] = std::make_shared<Entry>();
  }
  const std::shared_ptr<Entry> entry = exchanges_[message.key];
  if (!entry->exchange) {
    entry->early.emplace_back(from, std::move(message));
    if (joining_) JoinInLocked(entry);
    return;
  }
  TakeLocked(entry.get(), from, std::move(message));
  AdvanceLocked(entry.get());
  // A caller erases its own.
  if (joining_ && entry->exchange->done()) FinishLocked(entry);
}

void Communicator::TakeLocked(Entry* entry, int from, Message message) {
  std::vector<int> ranks(message.ranks.begin(), message.ranks.end());
  if (ranks.empty()) ranks = AllRanks(size_);
  if (message.contract != entry->own.contract || message.merger != entry->own.merger ||
      ranks != entry->own.ranks) {
    message.ranks.assign(ranks.begin(), ranks.end());
    FailLocked(ContractsDifferReport(entry->own, rank_, from, message));
    return;
  }
  if (message.step == kInvitation) return;
  entry->exchange->Take(from, message.step, {message.empty, std::move(message.payload)});
}

void Communicator::AdvanceLocked(Entry* entry) {
  if (!failure_.empty()) return;
  for (Exchange::Outgoing& out : entry->exchange->Advance()) {
    Message message = PartOfLocked(*entry, out.step);
    message.empty = out.part.empty;
    message.payload = std::move(out.part.payload);
    SendLocked(out.to, message);
  }
  CheckAwaitedLocked(entry);
}

void Communicator::CheckAwaitedLocked(Entry* entry) {
  const int awaited = entry->exchange->awaited();
  if (left_.count(awaited)) {
    FailLocked(RankLeftReport(entry->own, awaited));
  } else if (joined_.count(awaited) && !entry->invited) {
    // It would begin only when a part comes, but in this exchange it has to hand over the first.
    entry->invited = true;
    SendLocked(awaited, PartOfLocked(*entry, kInvitation));
  }
}

Message Communicator::PartOfLocked(const Entry& entry, int step) const {
  Message message;
  message.era = era_;
  message.step = step;
  message.key = entry.own.key;
  message.title = entry.own.title;
  message.contract = entry.own.contract;
  message.merger = entry.own.merger;
  if (static_cast<int>(entry.own.ranks.size()) < size_) {
    message.ranks.assign(entry.own.ranks.begin(), entry.own.ranks.end());
  }
  return message;
}

// Returns whether anything has come.
bool Communicator::ProgressLocked() {
  if (closed_) return false;
  bool any = false;
  try {
    int from = 0;
    Bytes bytes;
    while (wire_->Receive(&from, &bytes)) {
      any = true;
      HandleLocked(from, Decode(bytes));
    }
  } catch (const std::exception& error) {
    FailLocked(error.what());
  }
  return any;
}

void Communicator::HandleLocked(int from, Message message) {
  if (message.kind == MessageKind::kStatus) {
    const auto query = answers_.find(message.number);
    if (query != answers_.end()) query->second[from] = std::move(message);
    return;
  }
  heard_ = Clock::now();
  if (message.kind == MessageKind::kQuery) {
    SendLocked(from, StatusLocked(message));
    return;
  }
  if (message.kind == MessageKind::kLeave) {
    left_.insert(from);
    CheckLeaversLocked();
    return;
  }
  // A failure is of a whole generation.
  if (message.kind == MessageKind::kFail && message.era.generation == era_.generation) {
    if (failure_.empty()) failure_ = RankFailedReport(from, message.contract);
    return;
  }
  if (message.era < era_) return;
  if (era_ < message.era) {
    future_.emplace_back(from, std::move(message));
  } else if (message.kind == MessageKind::kJoin) {
    HandleJoinLocked(from, message.number);
  } else {
    HandlePartLocked(from, std::move(message));
  }
}

void Communicator::SendLocked(int to, const Message& message) {
  if (closed_) return;
  try {
    wire_->Send(to, Encode(message));
  } catch (const std::exception& error) {
    if (failure_.empty()) failure_ = Concat("sending to rank ", to, " failed: ", error.what());
  }
}

void Communicator::SendAllLocked(const Message& message) {
  for (int to = 0; to < size_; ++to) {
    if (to != rank_ && !left_.count(to)) SendLocked(to, message);
  }
}

// Whoever waits drives the wire itself; this thread serves the others meanwhile.
void Communicator::Work() {
  Lock lock(mutex_);
  Backoff backoff;
  while (!stop_) {
    if (ProgressLocked()) backoff.Restart();
    if (joining_ || wire_->Busy()) {
      lock.unlock();
      backoff.Pause();
      lock.lock();
    } else {
      // Only questions of others that wait for long come now.
      stop_changed_.wait_for(lock, std::chrono::milliseconds(2));
      backoff.Restart();
    }
  }
}

}  // namespace syncbn
