// What is no exchange: failure, eras, questions, joining, leaving, and the end.
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "collective/backoff.h"
#include "collective/communicator.h"
#include "collective/process_report.h"
#include "core/error.h"

namespace syncbn {
namespace {

// A fork copies neither the thread nor the connection to the other processes.
std::atomic<bool> forked{false};
const int on_fork = pthread_atfork(nullptr, nullptr, [] { forked = true; });

// A healthy process answers within milliseconds; a busy machine gets this long.
constexpr double kAnswerSeconds = 2;

const char kEnds[] = "the program ends";

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Communicator::Communicator(std::unique_ptr<Wire> wire)
    : wire_(std::move(wire)), rank_(wire_->rank()), size_(wire_->size()) {
  wire_->OnClose([this] { Stop(); });
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
    throw Error(Concat(title, ": called in a process that was forked from rank ", rank_,
                       "; only the process that called gluon_syncbn.distributed.init() "
                       "synchronizes"));
  }
}

void Communicator::CheckUsableLocked(const std::string& title) const {
  if (leaving_ || closed_) {
    throw Error(Concat(title, ": called after gluon_syncbn.distributed.shutdown(), or while MPI or "
                       "the program ends"));
  }
  if (!failure_.empty()) {
    throw Error(Concat(title, ": stopped because of an earlier error: ", failure_));
  }
}

// ---- failure -----------------------------------------------------------------------------------

void Communicator::Fail(const std::string& text) {
  if (forked) return;
  Lock lock(mutex_);
  FailLocked(text);
}

void Communicator::FailLocked(const std::string& text) {
  if (!failure_.empty() || leaving_ || closed_) return;
  failure_ = text;
  Message message;
  message.kind = MessageKind::kFail;
  message.era = era_;
  message.contract = text;
  SendAllLocked(message);
}

std::string Communicator::Failure() const {
  if (forked) return "";
  Lock lock(mutex_);
  return failure_;
}

void Communicator::Reset() {
  if (forked) return;
  Lock lock(mutex_);
  if (!failure_.empty() && !closed_) StartEraLocked({era_.generation + 1, 0});
}

void Communicator::StartEraLocked(syncbn::Era era) {
  era_ = era;
  failure_.clear();
  exchanges_.clear();
  finished_.clear();
  numbers_.clear();
  joined_.clear();
  joining_ = false;
  std::vector<std::pair<int, Message>> future;
  future.swap(future_);
  for (auto& message : future) HandleLocked(message.first, std::move(message.second));
}

int64_t Communicator::Era() const {
  if (forked) return 0;
  Lock lock(mutex_);
  return (static_cast<int64_t>(era_.generation) << 32) + era_.joins;
}

int64_t Communicator::NextNumber(const std::string& name) {
  if (forked) return 0;
  Lock lock(mutex_);
  return numbers_[name]++;
}

// ---- questions ---------------------------------------------------------------------------------

std::vector<int> Communicator::OthersLocked(const std::set<int>& but) const {
  std::vector<int> others;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && !but.count(rank)) others.push_back(rank);
  }
  return others;
}

// Asks these ranks whether they have come to `key`; returns the answers of those who answer.
std::map<int, Message> Communicator::AskLocked(Lock* lock, const std::vector<int>& ranks,
                                               const std::string& key, double timeout_seconds) {
  const int64_t number = queries_++;
  answers_[number];
  Message query;
  query.kind = MessageKind::kQuery;
  query.era = era_;
  query.number = number;
  query.key = key;
  for (int rank : ranks) SendLocked(rank, query);
  const auto start = Clock::now();
  const double limit = std::min(timeout_seconds, kAnswerSeconds);
  Backoff backoff;
  while (answers_[number].size() < ranks.size() && SecondsSince(start) < limit && !closed_) {
    if (ProgressLocked()) continue;
    lock->unlock();
    backoff.Pause();
    lock->lock();
  }
  std::map<int, Message> answers = std::move(answers_[number]);
  answers_.erase(number);
  return answers;
}

Message Communicator::StatusLocked(const Message& query) const {
  Message status;
  status.kind = MessageKind::kStatus;
  status.era = era_;
  status.number = query.number;
  const auto entry = exchanges_.find(query.key);
  status.step = query.era == era_ && entry != exchanges_.end() && entry->second->exchange ? 1 : 0;
  std::string waits;
  for (const auto& other : exchanges_) {
    if (!other.second->exchange) continue;
    waits += (waits.empty() ? "" : " and in ") + other.second->own.title;
  }
  if (leaving_) {
    status.contract = "has left";
  } else if (!failure_.empty()) {
    status.contract = "has failed: " + failure_;
  } else if (era_ < query.era) {
    status.contract = "has not called gluon_syncbn.recover() yet";
  } else if (!waits.empty()) {
    status.contract = "waits in " + waits;
  } else if (last_title_.empty()) {
    status.contract = "runs, but has come to no exchange yet";
  } else {
    status.contract = "runs, but is in no exchange; its latest was " + last_title_;
  }
  return status;
}

// Fails with the names of the missing; returns false if all have come meanwhile.
bool Communicator::FindMissingLocked(Lock* lock, const Entry& entry, double waited) {
  const std::vector<int> merged = entry.exchange->Merged();
  std::vector<int> unknown;
  for (int rank : entry.own.ranks) {
    if (!std::count(merged.begin(), merged.end(), rank)) unknown.push_back(rank);
  }
  const auto answers = AskLocked(lock, unknown, entry.own.key, entry.own.timeout_seconds);
  const bool all = std::all_of(unknown.begin(), unknown.end(), [&](int rank) {
    return answers.count(rank) && answers.at(rank).step == 1;
  });
  if (all || entry.exchange->done()) return false;
  FailLocked(RanksMissingReport(entry.own, merged, answers, waited));
  return true;
}

// ---- joining -----------------------------------------------------------------------------------

int Communicator::Join(double timeout_seconds) {
  const char title[] = "distributed.join";
  CheckNotForked(title);
  Lock lock(mutex_);
  CheckUsableLocked(title);
  joining_ = true;
  const syncbn::Era era = era_;
  Message message;
  message.kind = MessageKind::kJoin;
  message.era = era_;
  message.number = taken_part_;
  SendAllLocked(message);
  std::vector<std::shared_ptr<Entry>> begun;
  for (const auto& entry : exchanges_) begun.push_back(entry.second);
  for (const auto& entry : begun) {
    if (!entry->exchange) JoinInLocked(entry);
  }
  HandleJoinLocked(rank_, taken_part_);
  heard_ = Clock::now();
  CheckLeaversLocked();
  Backoff backoff;
  while (era_ == era) {
    if (!failure_.empty()) {
      joining_ = false;
      throw Error(Concat(title, ": ", failure_));
    }
    CheckUsableLocked(title);
    if (SecondsSince(heard_) > timeout_seconds) {
      std::set<int> known = {rank_};
      for (const auto& other : joined_) known.insert(other.first);
      const auto answers = AskLocked(&lock, OthersLocked(known), "", timeout_seconds);
      for (const auto& answer : answers) known.insert(answer.first);
      for (const auto& other : joined_) known.insert(other.first);
      const std::vector<int> silent = OthersLocked(known);
      if (!silent.empty()) {
        FailLocked(Concat(title, ": nothing was heard for ", timeout_seconds, " s, and ",
                          RankList(silent), " did not answer: died or stopped"));
      }
      heard_ = Clock::now();
    }
    lock.unlock();
    backoff.Pause();
    lock.lock();
    ProgressLocked();
  }
  return last_to_join_;
}

void Communicator::HandleJoinLocked(int from, int64_t number) {
  joined_[from] = number;
  for (const auto& entry : exchanges_) {
    if (entry.second->exchange) CheckAwaitedLocked(entry.second.get());
  }
  if (static_cast<int>(joined_.size()) < size_) return;
  last_to_join_ = 0;
  for (const auto& entry : joined_) {
    if (entry.second > joined_[last_to_join_]) last_to_join_ = entry.first;
  }
  StartEraLocked({era_.generation, era_.joins + 1});
}

// ---- the end -----------------------------------------------------------------------------------

void Communicator::CheckLeaversLocked() {
  for (const auto& entry : exchanges_) {
    if (entry.second->exchange) CheckAwaitedLocked(entry.second.get());
  }
  for (int rank : left_) {
    if (!joining_ || joined_.count(rank)) continue;
    Contribution own;
    own.title = "distributed.join";
    FailLocked(RankLeftReport(own, rank));
  }
}

void Communicator::Leave() {
  if (forked) return;
  Lock lock(mutex_);
  if (leaving_ || closed_) return;
  leaving_ = true;
  Message message;
  message.kind = MessageKind::kLeave;
  message.era = era_;
  for (int rank : OthersLocked({})) SendLocked(rank, message);
  if (failure_.empty()) failure_ = kEnds;
}

bool Communicator::AwaitLeave(double timeout_seconds) {
  if (forked) return false;
  Lock lock(mutex_);
  // After a failure some may never come, and others end soon.
  if (failure_ != kEnds) timeout_seconds = std::min(timeout_seconds, kAnswerSeconds);
  const auto start = Clock::now();
  Backoff backoff;
  while (!closed_ && SecondsSince(start) < timeout_seconds) {
    if (static_cast<int>(left_.size()) == size_ - 1 && !wire_->Busy()) return true;
    ProgressLocked();
    lock.unlock();
    backoff.Pause();
    lock.lock();
  }
  return false;
}

void Communicator::Stop() {
  if (forked) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  Leave();
  {
    Lock lock(mutex_);
    const auto start = Clock::now();
    while (!closed_ && wire_->Busy() && SecondsSince(start) < kAnswerSeconds) ProgressLocked();
    closed_ = stop_ = true;
  }
  stop_changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace syncbn
