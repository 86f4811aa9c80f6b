// What is no exchange: failure, eras, deadlines and questions, joining, leaving.
#include <algorithm>

#include "collective/process_report.h"
#include "collective/protocol.h"
#include "collective/timeout.h"
#include "core/error.h"

namespace syncbn {
namespace {

const char kJoinTitle[] = "distributed.join";

// A healthy process answers within milliseconds; a busy machine gets this long, or half of a short
// timeout.
constexpr std::chrono::seconds kAnswerTime{2};
// At the end nothing is lost by patience: who ends MPI too early ends the others with it.
constexpr std::chrono::seconds kLeaveAnswerTime{10};

Protocol::Duration AnswerTime(Protocol::Duration timeout) {
  return std::min<Protocol::Duration>(timeout / 2, kAnswerTime);
}

// An error that began with this wait needs no title in front.
std::string ErrorOf(const std::string& title, const std::string& failure) {
  const bool own = failure.compare(0, title.size(), title) == 0;
  return own ? failure : Concat(title, ": ", failure);
}

}  // namespace

void Protocol::CheckUsable(const std::string& title) const {
  if (leaving_) {
    throw Error(Concat(title, ": called after gluon_syncbn.distributed.shutdown(), or while MPI or "
                       "the program ends"));
  }
  if (!failure_.empty()) {
    throw Error(Concat(title, ": stopped because of an earlier error: ", failure_));
  }
}

// ---- failure -----------------------------------------------------------------------------------

void Protocol::Fail(const std::string& text) {
  if (!failure_.empty() || leaving_) return;
  SetFailure(text);
  Message message;
  message.kind = MessageKind::kFail;
  message.era = era_;
  message.contract = text;
  SendAll(message);
}

void Protocol::SetFailure(const std::string& text) {
  if (!failure_.empty() || leaving_) return;
  failure_ = text;
  EndWaits(text);
}

void Protocol::EndWaits(const std::string& reason) {
  for (const auto& entry : exchanges_) {
    Pending* const pending = entry.second.get();
    if (pending->waits) pending->error = ErrorOf(pending->own.title, reason);
  }
  if (joining_) join_error_ = ErrorOf(kJoinTitle, reason);
  joining_ = false;
}

// To the newest generation that this process has heard of: those between have failed elsewhere, and
// ranks that went through them one by one might never meet.
void Protocol::Reset() {
  if (failure_.empty()) return;
  int32_t generation = era_.generation + 1;
  for (const auto& message : future_) {
    const bool failed = message.second.kind == MessageKind::kFail;
    generation = std::max(generation, message.second.era.generation + (failed ? 1 : 0));
  }
  StartEra({generation, 0});
}

void Protocol::StartEra(Era era) {
  const bool joined = joining_;
  joining_ = false;
  EndWaits(joined ? "all ranks, this one too, have joined meanwhile" : failure_);
  era_ = era;
  failure_.clear();
  exchanges_.clear();
  finished_.clear();
  numbers_.clear();
  joined_.clear();
  taken_part_ = 0;
  queries_.clear();
  std::vector<std::pair<int, Message>> future;
  future.swap(future_);
  for (auto& message : future) {
    FailIfThrows([&] { Dispatch(message.first, std::move(message.second), heard_); });
  }
}

// ---- deadlines and questions -------------------------------------------------------------------

void Protocol::Tick(Time now) {
  for (const auto& entry : exchanges_) {
    if (entry.second->waits && !entry.second->over()) CheckDeadline(entry.second.get(), now);
  }
  if (joining_) CheckJoin(now);
  if (awaits_leave_) CheckLeave(now);
}

// Asks so early that the answers are there at the deadline. If all have come then, parts are under
// way and get time once more: so long that a rank which dies after its answer is named within the
// timeout of its death.
void Protocol::CheckDeadline(Pending* pending, Time now) {
  const Duration timeout = ToDuration(pending->own.timeout_seconds);
  const std::vector<int> merged = pending->exchange->Merged();
  std::vector<int> others;
  std::set_difference(pending->own.ranks.begin(), pending->own.ranks.end(), merged.begin(),
                      merged.end(), std::back_inserter(others));
  if (!pending->question) {
    if (now < pending->deadline - AnswerTime(timeout)) return;
    pending->deadline = now + AnswerTime(timeout);
    pending->question = Ask(others, pending->own.key, now);
    return;
  }
  if (now < pending->deadline) return;
  const std::map<int, Message>& answers = pending->question->answers;
  const bool all = std::all_of(others.begin(), others.end(), [&](int rank) {
    return answers.count(rank) && answers.at(rank).step == 1;
  });
  const double waited = std::chrono::duration<double>(now - pending->begun).count();
  if (!all) return Fail(RanksMissingReport(pending->own, merged, answers, waited));
  if (pending->extended) return Fail(PartsMissingReport(pending->own, waited));
  pending->extended = true;
  pending->deadline = pending->question->sent + timeout;
  pending->question.reset();
}

// Asks these ranks whether they have come to `key`.
std::shared_ptr<Protocol::Question> Protocol::Ask(const std::vector<int>& ranks,
                                                  const std::string& key, Time now) {
  for (auto old = questions_.begin(); old != questions_.end();) {
    old = old->second.expired() ? questions_.erase(old) : std::next(old);
  }
  const auto question = std::make_shared<Question>();
  question->sent = now;
  questions_[asked_] = question;
  Message query;
  query.kind = MessageKind::kQuery;
  query.era = era_;
  query.number = asked_++;
  query.key = key;
  for (int rank : ranks) Send(rank, query);
  return question;
}

// Answers, and once more when this process comes to what it is asked about.
void Protocol::HandleQuery(int from, Message query) {
  const Message status = StatusFor(query);
  Send(from, status);
  if (era_ < query.era) {
    future_.emplace_back(from, std::move(query));
  } else if (status.step == 0 && query.era == era_ && !query.key.empty()) {
    std::string key = query.key;
    queries_.emplace(std::move(key), std::make_pair(from, std::move(query)));
  }
}

Message Protocol::StatusFor(const Message& query) const {
  Message status;
  status.kind = MessageKind::kStatus;
  status.era = era_;
  status.number = query.number;
  const auto entry = exchanges_.find(query.key);
  const bool begun = entry != exchanges_.end() && entry->second->exchange;
  const bool finished =
      std::any_of(finished_.begin(), finished_.end(),
                  [&](const Contribution& own) { return own.key == query.key; });
  status.step = query.era == era_ && (begun || finished || joining_) ? 1 : 0;
  std::string waits;
  for (const auto& other : exchanges_) {
    if (!other.second->exchange) continue;
    waits += (waits.empty() ? "" : " and in ") + other.second->own.title;
  }
  if (leaving_) {
    status.contract = "has left";
  } else if (!failure_.empty()) {
    status.contract = "has failed: " + failure_;
  } else if (era_.generation < query.era.generation) {
    status.contract = "has not called gluon_syncbn.recover() yet";
  } else if (!waits.empty() || joining_) {
    status.contract = "waits in " + (waits.empty() ? kJoinTitle : waits);
  } else if (last_title_.empty()) {
    status.contract = "runs, but has come to no exchange yet";
  } else {
    status.contract = "runs, but is in no exchange; its latest was " + last_title_;
  }
  return status;
}

std::vector<int> Protocol::OthersBut(const std::set<int>& ranks) const {
  std::vector<int> others;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && !ranks.count(rank)) others.push_back(rank);
  }
  return others;
}

// ---- joining -----------------------------------------------------------------------------------

void Protocol::Join(double timeout_seconds, Time now) {
  CheckUsable(kJoinTitle);
  joining_ = true;
  join_error_.clear();
  join_question_.reset();
  join_timeout_ = ToDuration(timeout_seconds);
  heard_ = now;
  Message message;
  message.kind = MessageKind::kJoin;
  message.era = era_;
  message.number = taken_part_;
  SendAll(message);
  std::vector<std::shared_ptr<Pending>> begun_by_others;
  for (const auto& entry : exchanges_) {
    if (!entry.second->exchange) begun_by_others.push_back(entry.second);
  }
  for (const auto& pending : begun_by_others) FailIfThrows([&] { JoinIn(pending); });
  if (joining_) HandleJoin(rank_, taken_part_);
  CheckLeavers();
}

int Protocol::JoinResult() const {
  if (!join_error_.empty()) throw Error(join_error_);
  return last_to_join_;
}

void Protocol::HandleJoin(int from, int64_t number) {
  joined_[from] = number;
  for (const auto& entry : exchanges_) {
    if (entry.second->exchange) CheckAwaited(entry.second.get());
  }
  if (static_cast<int>(joined_.size()) < size_) return;
  last_to_join_ = 0;
  for (const auto& entry : joined_) {
    if (entry.second > joined_[last_to_join_]) last_to_join_ = entry.first;
  }
  StartEra({era_.generation, era_.joins + 1});
}

// After a timeout without a word those who have not joined have to answer.
void Protocol::CheckJoin(Time now) {
  std::set<int> known;
  for (const auto& entry : joined_) known.insert(entry.first);
  if (!join_question_) {
    if (now < heard_ + join_timeout_ - AnswerTime(join_timeout_)) return;
    join_question_ = Ask(OthersBut(known), "", now);
    return;
  }
  if (now < join_question_->sent + AnswerTime(join_timeout_)) return;
  for (const auto& answer : join_question_->answers) known.insert(answer.first);
  const std::vector<int> silent = OthersBut(known);
  join_question_.reset();
  heard_ = now;
  if (silent.empty()) return;
  const double seconds = std::chrono::duration<double>(join_timeout_).count();
  Fail(Concat(kJoinTitle, ": nothing was heard for ", seconds, " s, and ", RankList(silent),
              " did not answer: died or stopped"));
}

// ---- the end -----------------------------------------------------------------------------------

void Protocol::CheckLeavers() {
  for (const auto& entry : exchanges_) {
    if (entry.second->exchange) CheckAwaited(entry.second.get());
  }
  for (int rank : left_) {
    if (!joining_ || joined_.count(rank)) continue;
    Contribution own;
    own.title = kJoinTitle;
    Fail(RankLeftReport(own, rank));
  }
}

void Protocol::Leave() {
  if (leaving_) return;
  leaving_ = true;
  Message message;
  message.kind = MessageKind::kLeave;
  message.era = era_;
  for (int rank : OthersBut({})) Send(rank, message);
  EndWaits("the program ends");
  left_in_peace_ = failure_.empty();
}

void Protocol::CheckLeave(Time now) {
  if (leave_question_ && now < leave_question_->sent + kLeaveAnswerTime) return;
  const std::vector<int> others = OthersBut(left_);
  for (int rank : others) {
    if (leave_question_ && !leave_question_->answers.count(rank)) silent_ = true;
  }
  leave_question_ = Ask(others, "", now);
}

bool Protocol::Idle() const {
  return exchanges_.empty() && future_.empty() && queries_.empty() && !joining_;
}

}  // namespace syncbn
