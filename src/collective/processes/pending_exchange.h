// An exchange that this process has begun, with its caller's deadline.
// Who uses it: Protocol, and those who wait for the result. It must not know of other exchanges.
#pragma once
#include <memory>
#include <string>

#include "collective/processes/exchange.h"
#include "collective/processes/queries.h"

namespace syncbn {

struct PendingExchange {
  bool over() const { return !error.empty() || exchange->done(); }
  // The result of an exchange that is over; throws its error.
  Bytes Result();
  // Returns the text of a failure, or an empty one: others are asked before the deadline, and those
  // who have not begun by then are missing.
  std::string CheckDeadline(Time now, Queries* queries);

  Contribution own;                    // without its payload
  std::unique_ptr<Exchange> exchange;  // not null
  std::string error;                   // in place of a result
  bool waits = false;    // a caller waits, with a deadline; false if this process has joined
  bool invited = false;  // the awaited rank, which has joined
  Time begun, deadline;

 private:
  bool extended_ = false;
  std::shared_ptr<Question> question_;  // to those whose parts are missing
};

}  // namespace syncbn
