// Counts who has joined or left, and asks the others for signs of life.
#include "collective/processes/ranks.h"

#include "collective/processes/report.h"
#include "core/error.h"

namespace syncbn {
namespace {

// Waiting longer costs nothing at the end, and ending MPI too early ends the other processes.
constexpr std::chrono::seconds kLastAnswerTime{10};

}  // namespace

void Joining::Begin(double timeout_seconds, Time now) {
  active_ = true;
  error_.clear();
  question_.reset();
  timeout_ = ToDuration(timeout_seconds);
  heard_ = now;
}

int Joining::Result() const {
  if (!error_.empty()) throw Error(error_);
  return last_;
}

std::string Joining::Tick(Time now) {
  if (!active_) return "";
  std::set<int> known;
  for (const auto& entry : exchanges_) known.insert(entry.first);
  const Duration answer_time = Queries::AnswerTime(timeout_);
  if (!question_) {
    if (now < heard_ + timeout_ - answer_time) return "";
    question_ = queries_->Ask(ranks_.OthersBut(known), "", now);
    return "";
  }
  if (now < question_->sent + answer_time) return "";
  for (const auto& answer : question_->answers) known.insert(answer.first);
  const std::vector<int> unresponsive = ranks_.OthersBut(known);
  question_.reset();
  heard_ = now;
  if (unresponsive.empty()) return "";
  return Concat(kJoin, ": nothing was heard for ", ToSeconds(timeout_), " s, and ",
                RankList(unresponsive), " did not answer: died or stopped");
}

void Joining::Fail(const std::string& error) {
  if (active_) error_ = error;
  active_ = false;
}

void Joining::Finish() {
  active_ = false;
  last_ = 0;
  for (const auto& entry : exchanges_) {
    if (entry.second > exchanges_[last_]) last_ = entry.first;
  }
}

void Leaving::Tick(Time now) {
  if (!awaits_ || (question_ && now < question_->sent + kLastAnswerTime)) return;
  const std::vector<int> others = ranks_.OthersBut(left_);
  for (int rank : others) unresponsive_ |= question_ && !question_->answers.count(rank);
  question_ = queries_->Ask(others, "", now);
}

}  // namespace syncbn
