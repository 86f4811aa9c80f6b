// Matches answers with questions by their number.
#include "collective/processes/queries.h"

namespace syncbn {
namespace {

// A healthy process answers within milliseconds; a busy machine gets this long, or half of a short
// timeout.
constexpr std::chrono::seconds kAnswerTime{2};

}  // namespace

Duration Queries::AnswerTime(Duration timeout) {
  return std::min<Duration>(timeout / 2, kAnswerTime);
}

std::shared_ptr<Question> Queries::Ask(const std::vector<int>& ranks, const std::string& key,
                                       Time now) {
  for (auto old = asked_.begin(); old != asked_.end();) {
    old = old->second.expired() ? asked_.erase(old) : std::next(old);
  }
  const auto question = std::make_shared<Question>();
  question->sent = now;
  asked_[next_number_] = question;
  Message query(MessageKind::kQuery);
  query.number = next_number_++;
  query.key = key;
  for (int rank : ranks) send_(rank, query);
  return question;
}

void Queries::HandleAnswer(int from, Message answer) {
  const auto asked = asked_.find(answer.number);
  const auto question = asked == asked_.end() ? nullptr : asked->second.lock();
  if (question) question->answers[from] = std::move(answer);
}

}  // namespace syncbn
