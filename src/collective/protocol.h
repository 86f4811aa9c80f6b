// The processes of a program in conversation, as one of them follows it: many keyed exchanges at
// once, deadlines, questions, failure, join, leave. Messages and the time go in, messages go out.
// Who uses it: communicator.cc, which adds threads and waiting, and native tests that drive a
// thousand ranks from one thread in simulated time. It must not know of threads, of clocks, of the
// transport, nor what the bytes mean.
//
// Exchanges match by key, so ranks may begin them in any order.
#pragma once
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "collective/exchange.h"
#include "collective/message.h"
#include "collective/process_group.h"

namespace syncbn {

class Protocol {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = Time::duration;

  // What other ranks were asked, and what they have answered so far.
  struct Question {
    Time sent;
    std::map<int, Message> answers;
  };

  // An exchange that this process takes part in, or of which a part came before that.
  struct Pending {
    bool over() const { return !error.empty() || exchange->done(); }

    Contribution own;                    // its payload has moved on
    std::unique_ptr<Exchange> exchange;  // null until this process takes part
    std::string error;                   // instead of a result
    bool waits = false;                  // has a caller here and a deadline; false for one joined in
    bool invited = false, extended = false;
    Time begun, deadline;
    std::shared_ptr<Question> question;  // whether those have come whose parts have not
    std::vector<std::pair<int, Message>> early;
  };

  // `send` starts to send; what it throws fails the exchanges.
  Protocol(int rank, int size, std::function<void(int to, Bytes message)> send);

  // Throws Error if nothing can be begun any more. Later errors are the exchange's own.
  std::shared_ptr<Pending> Begin(Contribution own, Time now);
  // The result of an exchange that is over; throws its error.
  static Bytes Result(Pending* pending);

  // To be called for every message that comes, and again and again while something is awaited.
  void Handle(int from, const Bytes& bytes, Time now);
  void Tick(Time now);

  Era era() const { return era_; }
  int64_t NextNumber(const std::string& name) { return numbers_[name]++; }
  const std::string& failure() const { return failure_; }
  void Fail(const std::string& text);
  void Reset();

  // See Communicator::Join. It is over when joining() is false; JoinResult then returns or throws.
  void Join(double timeout_seconds, Time now);
  bool joining() const { return joining_; }
  int JoinResult() const;

  void Leave();
  // Whether no failure came before this process left.
  bool LeftInPeace() const { return left_in_peace_; }
  bool AllLeft() const { return static_cast<int>(left_.size()) == size_ - 1; }
  // From now on asks those who have not left; AnyoneSilent tells that one of them does not answer.
  void AwaitLeave() { awaits_leave_ = true; }
  bool AnyoneSilent() const { return silent_; }

  // Whether nothing is kept of exchanges, questions and messages; for tests.
  bool Idle() const;

 private:
  void Dispatch(int from, Message message, Time now);
  void HandlePart(int from, Message message);
  void HandleJoin(int from, int64_t number);
  void HandleQuery(int from, Message query);
  template <typename Body>
  void FailIfThrows(const Body& body);
  std::unique_ptr<Exchange> MakeExchange(Contribution* own, bool empty) const;
  void Start(const std::shared_ptr<Pending>& pending, Contribution own,
             std::unique_ptr<Exchange> exchange);
  void JoinIn(const std::shared_ptr<Pending>& pending);
  void Take(Pending* pending, int from, Message message);
  void Advance(const std::shared_ptr<Pending>& pending);
  void CheckAwaited(Pending* pending);
  void Remember(const std::shared_ptr<Pending>& pending);
  Message PartOf(const Pending& pending, int step) const;
  std::vector<int> RanksOf(const Message& message) const;
  void StartEra(Era era);
  void SetFailure(const std::string& text);
  void EndWaits(const std::string& reason);
  void CheckUsable(const std::string& title) const;
  void CheckLeavers();
  void CheckDeadline(Pending* pending, Time now);
  void CheckJoin(Time now);
  void CheckLeave(Time now);
  std::shared_ptr<Question> Ask(const std::vector<int>& ranks, const std::string& key, Time now);
  Message StatusFor(const Message& query) const;
  std::vector<int> OthersBut(const std::set<int>& ranks) const;
  void Send(int to, const Message& message);
  void SendAll(const Message& message);

  const int rank_, size_;
  const std::function<void(int, Bytes)> send_;
  Era era_;
  std::map<std::string, std::shared_ptr<Pending>> exchanges_;  // of this era, by key
  std::deque<Contribution> finished_;  // the latest; a part that comes after them is of others
  std::vector<std::pair<int, Message>> future_;  // of eras that this process has not reached
  // Questions about exchanges that it has not begun, by key.
  std::multimap<std::string, std::pair<int, Message>> queries_;
  std::map<int64_t, std::weak_ptr<Question>> questions_;
  std::map<std::string, int64_t> numbers_;
  std::map<int, int64_t> joined_;  // rank to the number of exchanges it took part in
  std::set<int> left_;
  std::string failure_, join_error_, last_title_;
  int64_t asked_ = 0, taken_part_ = 0;
  int last_to_join_ = 0;
  bool joining_ = false, leaving_ = false, left_in_peace_ = false;
  bool awaits_leave_ = false, silent_ = false;
  Time heard_;  // while joining
  Duration join_timeout_{};
  std::shared_ptr<Question> join_question_, leave_question_;
};

template <typename Body>
void Protocol::FailIfThrows(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    Fail(error.what());
  }
}

}  // namespace syncbn
