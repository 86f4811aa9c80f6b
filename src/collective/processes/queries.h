// Questions between processes: "have you reached this exchange?"
// Who uses it: PendingExchange, Joining and Leaving ask where others are late; Protocol answers
// others. It must not know the reason of a question.
#pragma once
#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "collective/common/timeout.h"
#include "collective/processes/message.h"

namespace syncbn {

struct Question {
  Time sent;
  std::map<int, Message> answers;  // by rank
};

class Queries {
 public:
  // Starts to send.
  using Send = std::function<void(int to, Message message)>;

  explicit Queries(Send send) : send_(std::move(send)) {}

  // The time that an answer may take, for a rank that waits for `timeout`. A healthy process answers
  // within milliseconds; a busy machine gets two seconds, or half of a short timeout.
  static Duration AnswerTime(Duration timeout) {
    return std::min<Duration>(timeout / 2, std::chrono::seconds(2));
  }

  // Asks these ranks whether they have reached `key`. Answers are noted as long as the caller keeps
  // the question.
  std::shared_ptr<Question> Ask(const std::vector<int>& ranks, const std::string& key, Time now) {
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

  void HandleAnswer(int from, Message answer) {
    const auto asked = asked_.find(answer.number);
    const auto question = asked == asked_.end() ? nullptr : asked->second.lock();
    if (question) question->answers[from] = std::move(answer);
  }

 private:
  const Send send_;
  std::map<int64_t, std::weak_ptr<Question>> asked_;
  int64_t next_number_ = 0;
};

}  // namespace syncbn
