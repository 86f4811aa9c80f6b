// One exchange as one process sees it: the parts that it sends, awaits and reduces, in their order.
// Who uses it: protocol.cc, which carries the parts. It must not know of threads or time.
//
// Recursive doubling: in round j a process swaps what it has with the one whose number differs in
// bit j, so after log2(n) rounds, and as many messages, all have all. Both sides of a swap reduce
// the same two parts, lower ranks first, so the result is the same bytes everywhere. If n is no
// power of two, some pairs of neighbours begin as one (the odd one hands its part over) and the odd
// ones get the result at the end. Thakur, Rabenseifner and Gropp, doi:10.1177/1094342005051521.
#pragma once
#include <map>
#include <vector>

#include "collective/common/reduce_operation.h"

namespace syncbn {

struct Part {
  bool empty = false;  // no rank in it contributed data
  Bytes payload;
};

class Exchange {
 public:
  struct Outgoing {
    int to = 0;
    int step = 0;
    Part part;
  };

  // `ranks` ascend and hold `own`.
  Exchange(std::vector<int> ranks, int own, Part own_part, ReduceOperation operation);

  // Keeps a part from another process until it is its turn.
  void Take(int from, int step, Part part);
  // Reduces and sends as far as the parts reach; returns the parts to be sent now.
  std::vector<Outgoing> Advance();

  bool done() const { return next_ == schedule_.size(); }
  Bytes& result() { return part_.payload; }
  // The rank whose part is needed next; -1 if none.
  int awaited() const;
  // The ranks whose parts are not reduced yet.
  std::vector<int> Outstanding() const;

 private:
  struct Action {
    int peer = 0;  // positions in ranks_, as are begin and end
    int step = 0;
    bool send = false, receive = false;
    int begin = 0, end = 0;  // whose parts are reduced after it
  };

  void Plan(int own);
  void Merge(Part other, const Action& action);

  const std::vector<int> ranks_;
  const ReduceOperation operation_;
  std::vector<Action> schedule_;
  size_t next_ = 0;
  bool sent_ = false;  // the action at next_ has sent its part
  Part part_;
  int begin_, end_;
  std::map<int, std::pair<int, Part>> inbox_;  // by step: the sender and its part
};

}  // namespace syncbn
