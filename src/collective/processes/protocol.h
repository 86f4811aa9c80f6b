// A Protocol keeps, for one process, the promises that the processes of a program make each other.
// Messages and the time go in, messages go out: communicator.h adds threads and waiting, and native
// tests drive a thousand ranks from one thread in simulated time.
//
// * Exchanges match by key. Ranks may begin them in any order, and many may be in flight.
// * The parts of an exchange go up a tree (tree.h), are reduced in the order of ranks, and the
//   result comes back down: every rank gets the same bytes.
// * Every wait ends: with the result, or with an error that names the ranks that are missing, and
//   says of each what was heard of it. A rank whose time is over asks its neighbours in the tree,
//   who know of theirs; one that does not answer is the one that is missing.
// * A failure of one rank is a failure of all, for good: every exchange, now and later, ends with
//   the text of the first one. A failure reaches one rank before its update and another after it,
//   so nobody could know where all would go on.
// * A rank that leaves says so, and exchanges that need it end at once.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "collective/common/timeout.h"
#include "collective/processes/message.h"
#include "collective/processes/tree.h"

namespace syncbn {

// One exchange, from the first part that arrives, its own or another's, until its result is there.
struct Exchange {
  Agreement agreement;
  std::vector<Subtree> subtrees;  // whose parts this rank reduces: its own, and its children's
  std::map<int, Bytes> parts;     // of the subtrees, by their first rank
  bool begun = false;             // this rank contributes, and waits
  bool sent = false;              // to the parent
  bool done = false;
  Bytes result;
  std::string error;  // in place of a result
  Time start, deadline;
  bool late = false;  // those who may know more were asked
};

class Protocol {
 public:
  // `send` starts to send; what throws is a failure.
  Protocol(int rank, int size, std::function<void(int to, Bytes message)> send);

  // Contributes to an exchange. It is over when it is done or has an error. Throws Error if nothing
  // can begin any more.
  std::shared_ptr<Exchange> Begin(Contribution own, Time now);

  // Handle is called for every message, Tick repeatedly while something waits.
  void Handle(int from, const Bytes& bytes, Time now);
  void Tick(Time now);

  // The key of the next call of this name, for calls that match by their order on the ranks.
  std::string NextKey(const std::string& name);

  void Fail(const std::string& text);
  const std::string& failure() const { return failure_; }

  // Tells the others that this process ends, and ends its waits.
  void Leave();
  bool AllHaveLeft() const { return static_cast<int>(left_.size()) == size_ - 1; }

  bool Idle() const { return exchanges_.empty(); }  // for tests

 private:
  using Shared = std::shared_ptr<Exchange>;

  Exchange* Find(const Agreement& agreement, int from);
  void Advance(const std::string& key);
  void Answer(const std::string& key);
  void EndWait(Exchange* exchange, Duration waited, Time deadline);
  void HandleLate(int from, const Message& message, Time now);
  void CheckLeft(const Exchange& exchange);
  void CheckUsable(const std::string& title) const;
  bool SetFailure(std::string text);
  void EndWaits(const std::string& reason);

  int Parent(const Exchange& exchange) const;
  bool IsChild(int rank, const Exchange& exchange) const;
  std::vector<Subtree> Awaited(const Exchange& exchange) const;
  std::string MissingReport(const Exchange& exchange, double seconds) const;
  std::string WhatIsKnownOf(int rank) const;

  void Send(int to, Message message);
  void SendAll(const Message& message);

  const int rank_, size_;
  const std::function<void(int, Bytes)> send_;
  std::map<std::string, Shared> exchanges_;    // by key
  std::map<std::string, Agreement> finished_;  // by key, the latest ones
  std::deque<std::string> finished_keys_;
  std::map<std::string, int64_t> numbers_;     // of calls, by name
  std::map<int, std::string> latest_titles_;   // of the parts of each rank
  std::string failure_;

  bool leaving_ = false;
  std::set<int> left_;
};

}  // namespace syncbn
