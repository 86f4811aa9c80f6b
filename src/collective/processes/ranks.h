// The ranks of a program, as one of them sees them: all; those that have joined, which contribute
// nothing more until all have; and those that have left for good.
// Who uses it: Protocol, which tells Joining and Leaving of messages and of time. They must not
// know of exchanges, nor send anything but queries.
#pragma once
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "collective/processes/queries.h"

namespace syncbn {

struct Ranks {
  // All but this process and those in `excluded`, ascending.
  std::vector<int> OthersBut(const std::set<int>& excluded) const {
    std::vector<int> others;
    for (int rank = 0; rank < size; ++rank) {
      if (rank != own && !excluded.count(rank)) others.push_back(rank);
    }
    return others;
  }

  int own, size;
};

class Joining {
 public:
  Joining(const Ranks& ranks, Queries* queries) : ranks_(ranks), queries_(queries) {}

  // This process has joined and waits for the others.
  void Begin(double timeout_seconds, Time now);
  bool active() const { return active_; }
  // The result of a wait that is over: the rank that made the most exchanges. Throws Error.
  int Result() const;

  // `rank`, which may be this one, has joined after so many exchanges.
  void Add(int rank, int64_t exchanges) { exchanges_[rank] = exchanges; }
  bool Has(int rank) const { return exchanges_.count(rank) > 0; }
  bool Complete() const { return static_cast<int>(exchanges_.size()) == ranks_.size; }

  void Hear(Time now) { heard_ = now; }
  // Returns the text of a failure, or an empty one: after a timeout without a message, those who
  // have not joined have to answer.
  std::string Tick(Time now);

  // Ends a wait with an error.
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

class Leaving {
 public:
  Leaving(const Ranks& ranks, Queries* queries) : ranks_(ranks), queries_(queries) {}

  // This process leaves; `clean` if nothing has failed.
  void Begin(bool clean) {
    begun_ = true;
    clean_ = clean;
  }
  bool begun() const { return begun_; }
  bool clean() const { return clean_; }

  // Another rank has left.
  void Add(int rank) { left_.insert(rank); }
  const std::set<int>& left() const { return left_; }
  bool Complete() const { return static_cast<int>(left_.size()) == ranks_.size - 1; }

  // From now on asks the ranks that have not left; HasUnresponsive tells that one does not answer.
  void Await() { awaits_ = true; }
  bool HasUnresponsive() const { return unresponsive_; }
  void Tick(Time now);

 private:
  const Ranks ranks_;
  Queries* const queries_;
  std::set<int> left_;
  std::shared_ptr<Question> question_;
  bool begun_ = false, clean_ = false, awaits_ = false, unresponsive_ = false;
};

}  // namespace syncbn
