// The protocol between the processes of a program, as one of them follows it: many keyed exchanges
// at once, and their failure. Messages and the time go in, messages go out. Deadlines, queries,
// joining and leaving have separate classes.
// Who uses it: communicator.cc, which adds threads and waiting, and native tests that drive a
// thousand ranks from one thread in simulated time. It must not know of threads, of clocks, of the
// transport, nor what the bytes mean.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "collective/processes/message.h"
#include "collective/processes/pending_exchange.h"
#include "collective/processes/queries.h"
#include "collective/processes/ranks.h"

namespace syncbn {

class Protocol {
 public:
  // `send` starts to send; the exchanges fail if it throws.
  Protocol(int rank, int size, std::function<void(int to, Bytes message)> send);

  // Throws Error after a failure, or after Leave. Later errors are the exchange's own.
  std::shared_ptr<PendingExchange> Begin(Contribution own, Time now);

  // Handle is called for every message, Tick repeatedly while something is awaited.
  void Handle(int from, const Bytes& bytes, Time now);
  void Tick(Time now);

  std::string NextKey(const std::string& name);
  const std::string& failure() const { return failure_; }
  void Fail(const std::string& text);
  void Reset();

  // See Communicator::Join. The wait is over when joining() is not active.
  void Join(double timeout_seconds, Time now);
  const Joining& joining() const { return joining_; }

  void Leave();
  Leaving& leaving() { return leaving_; }

  // True if no exchange, query or message is kept; for tests.
  bool Idle() const;

 private:
  using Pending = std::shared_ptr<PendingExchange>;

  void Dispatch(int from, Message message);
  void HandlePart(int from, Message message);
  void HandleJoin(int from, int64_t number);
  void HandleQuery(int from, Message query);
  void FailIfThrows(const std::function<void()>& body);
  Pending Make(Contribution own, bool empty) const;
  void Start(const Pending& pending);
  void JoinIn(const std::string& key);
  void TakePart(PendingExchange* pending, int from, Message message);
  void Advance(const Pending& pending);
  void CheckAwaited(PendingExchange* pending);
  void CheckAllAwaited();
  void StartGeneration(Generation generation, const std::string& reason);
  bool SetFailure(const std::string& text);
  void EndWaits(const std::string& reason);
  void CheckUsable(const std::string& title) const;
  void CheckLeavers();
  Message StatusFor(const Message& query) const;
  void Send(int to, Message message);
  void SendAll(const Message& message);

  const Ranks ranks_;
  const std::function<void(int, Bytes)> send_;
  Generation generation_;
  // Of this generation, by key: exchanges that this process has begun, and parts of those that it
  // has not, and queries for those.
  std::map<std::string, Pending> exchanges_;
  ReceivedByKey early_, questions_;
  std::deque<Agreement> finished_;  // the latest exchanges, for parts that arrive too late
  std::vector<Received> future_;    // of later generations
  std::map<std::string, int64_t> numbers_;
  std::string failure_, last_title_;
  int64_t taken_part_ = 0;
  Queries queries_;
  Joining joining_;
  Leaving leaving_;
};

}  // namespace syncbn
