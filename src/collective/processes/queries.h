// Questions between processes: "have you reached this exchange?"
// Who uses it: PendingExchange, Joining and Leaving ask where others are late; Protocol answers
// others. It must not know the reason of a question.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "collective/processes/message.h"
#include "collective/common/timeout.h"

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

  // The time that an answer may take, for a rank that waits for `timeout`.
  static Duration AnswerTime(Duration timeout);

  // Asks these ranks whether they have reached `key`. Answers are noted as long as the caller keeps
  // the question.
  std::shared_ptr<Question> Ask(const std::vector<int>& ranks, const std::string& key, Time now);
  void HandleAnswer(int from, Message answer);

 private:
  const Send send_;
  std::map<int64_t, std::weak_ptr<Question>> asked_;
  int64_t next_number_ = 0;
};

}  // namespace syncbn
