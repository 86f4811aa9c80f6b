// The ranks that have left the program for good, and signs of life of the others.
// Who uses it: Protocol, which tells it of messages and of time. It must not know of exchanges, nor
// send anything but queries.
#pragma once
#include <memory>
#include <set>
#include <vector>

#include "collective/queries.h"
#include "collective/ranks.h"

namespace syncbn {

class Leaving {
 public:
  Leaving(const Ranks& ranks, Queries* queries) : ranks_(ranks), queries_(queries) {}

  // This process leaves; `in_peace` if nothing has failed.
  void Begin(bool in_peace) {
    begun_ = true;
    in_peace_ = in_peace;
  }
  bool begun() const { return begun_; }
  bool in_peace() const { return in_peace_; }

  // Another rank has left.
  void Add(int rank) { left_.insert(rank); }
  const std::set<int>& left() const { return left_; }
  bool Complete() const { return static_cast<int>(left_.size()) == ranks_.size - 1; }

  // From now on asks those who have not left; AnyoneSilent tells that one of them does not answer.
  void Await() { awaits_ = true; }
  bool AnyoneSilent() const { return silent_; }
  void Tick(Time now) {
    if (!awaits_ || (question_ && now < question_->sent + kAnswerTime)) return;
    const std::vector<int> others = ranks_.OthersBut(left_);
    for (int rank : others) silent_ |= question_ && !question_->answers.count(rank);
    question_ = queries_->Ask(others, "", now);
  }

 private:
  // At the end nothing is lost by patience: who ends MPI too early ends the others with it.
  static constexpr std::chrono::seconds kAnswerTime{10};

  const Ranks ranks_;
  Queries* const queries_;
  std::set<int> left_;
  std::shared_ptr<Question> question_;
  bool begun_ = false, in_peace_ = false, awaits_ = false, silent_ = false;
};

}  // namespace syncbn
