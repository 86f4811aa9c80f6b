// The deadline of an exchange: the questions before it, and the verdict.
#include "collective/processes/pending_exchange.h"

#include <algorithm>

#include "collective/processes/report.h"

namespace syncbn {

Bytes PendingExchange::Result() {
  if (!error.empty()) throw Error(error);
  return std::move(exchange->result());
}

// Queries the ranks before the deadline, so that answers arrive by then. If all have begun, their
// parts are on the way, and the deadline is extended once: a rank that dies after its answer is
// still named within the timeout of its death.
std::string PendingExchange::CheckDeadline(Time now, Queries* queries) {
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

}  // namespace syncbn
