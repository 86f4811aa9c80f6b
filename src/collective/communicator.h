// The processes of a program in conversation: many keyed exchanges at once, failure, join, leave.
// Who uses it: c_api.cc makes the one of the process; Group and Python exchange through it. It
// must not know the medium (wire.h) nor what the bytes mean.
//
// Whoever waits for an exchange drives the wire itself, which saves two changes of thread; a thread
// of its own answers other processes while nobody waits. Waiting spins briefly and then sleeps.
// Exchanges match by key, so ranks may begin them in any order.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "collective/exchange.h"
#include "collective/message.h"
#include "collective/process_group.h"

namespace syncbn {

class Communicator : public ProcessGroup {
 public:
  explicit Communicator(std::unique_ptr<Wire> wire);
  ~Communicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Bytes AllReduce(Contribution contribution) override;
  int64_t Era() const override;
  void Fail(const std::string& text) override;

  // The text of the failure; empty while all is well.
  std::string Failure() const;
  // Forgets a failure; every rank has to call it before exchanges work again.
  void Reset();

  // 0, 1, ... for each name, from zero in each era: makes keys of calls that match by their order.
  int64_t NextNumber(const std::string& name);

  // Brings nothing to the others' exchanges until every rank has joined. Returns the rank that
  // took part in the most exchanges, the same on every rank. Throws Error if a rank fails or, when
  // nothing was heard for `timeout` seconds, does not answer.
  int Join(double timeout_seconds);

  // Tells the others that this process ends; ends its own waits. Does not wait for anybody.
  void Leave();
  // Waits until every other rank has left as well; false if that takes too long, for which a
  // moment counts after a failure.
  bool AwaitLeave(double timeout_seconds);
  // Ends the thread and the use of the wire. Nothing works afterwards.
  void Stop();

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Clock = std::chrono::steady_clock;

  // An exchange that this process takes part in, or of which a part came before that.
  struct Entry {
    Contribution own;  // its payload has moved on
    std::unique_ptr<Exchange> exchange;  // null until this process takes part
    bool invited = false;
    std::vector<std::pair<int, Message>> early;
  };

  void Work();
  bool ProgressLocked();
  void HandleLocked(int from, Message message);
  void HandlePartLocked(int from, Message message);
  void HandleJoinLocked(int from, int64_t number);
  void BeginLocked(const std::shared_ptr<Entry>& entry, Contribution own, bool empty);
  void JoinInLocked(const std::shared_ptr<Entry>& entry);
  void TakeLocked(Entry* entry, int from, Message message);
  void AdvanceLocked(Entry* entry);
  void CheckAwaitedLocked(Entry* entry);
  void FinishLocked(const std::shared_ptr<Entry>& entry);
  Message PartOfLocked(const Entry& entry, int step) const;
  void CheckLeaversLocked();
  void FailLocked(const std::string& text);
  void StartEraLocked(syncbn::Era era);
  void CheckNotForked(const std::string& title) const;
  void CheckUsableLocked(const std::string& title) const;
  void SendLocked(int to, const Message& message);
  void SendAllLocked(const Message& message);
  std::map<int, Message> AskLocked(Lock* lock, const std::vector<int>& ranks,
                                   const std::string& key, double timeout_seconds);
  Message StatusLocked(const Message& query) const;
  bool FindMissingLocked(Lock* lock, const Entry& entry, double waited);
  std::vector<int> OthersLocked(const std::set<int>& but) const;

  const std::unique_ptr<Wire> wire_;
  const int rank_, size_;
  mutable std::mutex mutex_;
  std::condition_variable stop_changed_;
  syncbn::Era era_;
  std::map<std::string, std::shared_ptr<Entry>> exchanges_;  // of this era, by key
  std::deque<Contribution> finished_;  // the latest; a part that comes after them is of others
  std::vector<std::pair<int, Message>> future_;  // of eras that this process has not reached
  std::map<std::string, int64_t> numbers_;
  std::map<int, int64_t> joined_;  // rank to the number of exchanges it took part in
  std::set<int> left_;
  std::map<int64_t, std::map<int, Message>> answers_;  // by query
  std::string failure_, last_title_;
  int64_t queries_ = 0, taken_part_ = 0;
  int last_to_join_ = 0;
  bool joining_ = false, leaving_ = false, closed_ = false, stop_ = false;
  Clock::time_point heard_ = Clock::now();
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace syncbn
