// An exchange that this process has begun, with its caller's deadline.
// Who uses it: Protocol, and those who wait for the result. It must not know of other exchanges.
#pragma once
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "collective/processes/exchange.h"
#include "collective/processes/queries.h"
#include "collective/processes/report.h"

namespace syncbn {

struct PendingExchange {
  bool over() const { return !error.empty() || exchange->done(); }
  // The result of an exchange that is over; throws its error.
  Bytes Result() {
    if (!error.empty()) throw Error(error);
    return std::move(exchange->result());
  }

  // Returns the text of a failure, or an empty one. Others are asked before the deadline, so that
  // answers arrive by then, and those who have not begun are missing. If all have begun, their
  // parts are on the way, and the deadline is extended once: a rank that dies after its answer is
  // still named within the timeout of its death.
  std::string CheckDeadline(Time now, Queries* queries) {
    const Duration timeout = ToDuration(own.timeout_seconds);
    if (now < (question_ ? deadline : deadline - Queries::AnswerTime(timeout))) return "";
    const std::vector<int> others = exchange->Outstanding();
    if (!question_) {
      deadline = now + Queries::AnswerTime(timeout);
      question_ = queries->Ask(others, own.key, now);
      return "";
    }
    const std::map<int, Message>& answers = question_->answers;
    const bool all = std::all_of(others.begin(), others.end(), [&](int rank) {
      return answers.count(rank) && answers.at(rank).step == 1;
    });
    const double waited = ToSeconds(now - begun);
    if (!all) return RanksMissingReport(own, others, answers, waited);
    if (extended_) return PartsMissingReport(own, waited);
    extended_ = true;
    deadline = question_->sent + timeout;
    question_.reset();
    return "";
  }

  Contribution own;                    // without its payload
  std::unique_ptr<Exchange> exchange;  // not null
  std::string error;                   // in place of a result
  bool waits = false;    // a caller waits, with a deadline; false if this process has joined
  bool invited = false;  // the awaited rank, which has joined
  Time begun, deadline;

 private:
  bool extended_ = false;
  std::shared_ptr<Question> question_;  // to those whose parts are missing
};

}  // namespace syncbn
