// The ranks that have joined: they contribute nothing more until all have.
// Who uses it: Protocol, which tells it of messages and of time. It must not know of exchanges, nor
// send anything but queries.
#pragma once
#include <map>
#include <memory>
#include <string>

#include "collective/queries.h"
#include "collective/ranks.h"

namespace syncbn {

class Joining {
 public:
  Joining(const Ranks& ranks, Queries* queries) : ranks_(ranks), queries_(queries) {}

  // This process has joined and waits for the others.
  void Begin(double timeout_seconds, Time now);
  bool active() const { return active_; }
  // The result of a wait that is over: the rank that took part in the most exchanges. Throws Error.
  int Result() const;

  // `rank`, maybe this one, has joined after so many exchanges.
  void Add(int rank, int64_t exchanges) { exchanges_[rank] = exchanges; }
  bool Has(int rank) const { return exchanges_.count(rank) > 0; }
  bool Complete() const { return static_cast<int>(exchanges_.size()) == ranks_.size; }

  void Hear(Time now) { heard_ = now; }
  // Returns the text of a failure, or an empty one: after a timeout without a message, those who
  // have not joined have to answer.
  std::string Tick(Time now);

  // Ends the wait, if there is one, with an error.
  void Fail(const std::string& error);
  // All have joined.
  void Finish();
  // Forgets who has joined, for a new generation.
  void Forget() { exchanges_.clear(); }

 private:
  const Ranks ranks_;
  Queries* const queries_;
  std::map<int, int64_t> exchanges_;  // by rank
  bool active_ = false;
  Duration timeout_{};
  Time heard_;
  std::shared_ptr<Question> question_;
  std::string error_;
  int last_ = 0;
};

}  // namespace syncbn
