// How failures, and ranks that leave, end the exchanges of a table.
#include <pthread.h>

#include <cstdio>
#include <new>

#include "core/error.h"
#include "exchange/report.h"
#include "exchange/table.h"

namespace syncbn {
namespace {

constexpr std::chrono::seconds kDelivery{2};  // limits the wait until the last messages are sent
constexpr double kCloseSeconds = 30;  // limits the wait for other ranks to leave after a failure

}  // namespace

// ---- failures ----------------------------------------------------------------------------------

void Table::Fail(const std::string& text, bool tell_ranks) {
  Lock lock(mutex_);
  if (Members::alive > 0 || peers_.IsConnected()) FailLocked(text, tell_ranks);
}

void Table::FailLocked(const std::string& text, bool tell_ranks) {
  for (const auto& [key, exchange] : exchanges_) {
    tell_ranks = tell_ranks || (!key.is_local && exchange->arrived > 0);
  }
  if (failure_.empty()) failure_ = text;
  if (tell_ranks && peers_.IsConnected() && !peers_.has_left() && !failed_for_good_) {
    failed_for_good_ = true;
    peers_.Broadcast(FailMessage{failure_});
  }
  EndWhere(failure_, [&](const Exchange& e) { return failed_for_good_ || e.key.is_local; });
}

std::string Table::Failure() {
  Lock lock(mutex_);
  Serve();
  return failure_;
}

void Table::Reset() {
  Lock lock(mutex_);
  notice_given_ = false;
  ++resets_;
  if (!failed_for_good_) failure_.clear();
}

void Table::EndWhere(const std::string& reason, const std::function<bool(const Exchange&)>& ends) {
  const std::map<Key, Shared> exchanges = exchanges_;
  for (const auto& [key, exchange] : exchanges) {
    if (!ends(*exchange)) continue;
    const std::string title = key.Title();
    const bool has_title = reason.compare(0, title.size(), title) == 0;
    End(exchange, has_title ? reason : Concat(title, ": ", reason));
  }
}

// ---- the other processes -----------------------------------------------------------------------

void Table::Connect(std::unique_ptr<Transport> transport) {
  Lock lock(mutex_);
  transport->OnFinalize([this] { return Disconnect(default_timeout, kCloseSeconds); });
  peers_.Connect(std::move(transport));
  // Another thread may have held the mutex at the fork.
  pthread_atfork(nullptr, nullptr, [] {
    Get().peers_.SetForked();
    new (&Get().mutex_) std::mutex;
  });
}

// Throws Error if the exchange needs a message of a rank that has left.
void Table::CheckLeft(const Exchange& exchange) {
  if (exchange.arrived == 0) return;
  for (const Subtree& other : exchange.Missing()) {
    if (!peers_.PeerHasLeft(other.rank)) continue;
    throw Error(Concat(exchange.key.Title(), ": rank ", other.rank,
                       " has left: its program has ended or called ", kShutdown,
                       ", so this exchange cannot complete."));
  }
}

void Table::Leave() {
  Lock lock(mutex_);
  if (peers_.closed()) return;
  peers_.Leave();
  EndWhere("the program ends", [](const Exchange& exchange) { return !exchange.key.is_local; });
}

bool Table::Disconnect(double seconds, double seconds_after_failure) {
  Leave();
  Lock lock(mutex_);
  Departure departure{ToDuration(seconds), ToDuration(seconds_after_failure), Clock::now(),
                      Clock::now()};
  ServeUntil(&lock, Time::max(), [&] { return MayClose(&departure, Clock::now()); });
  ServeUntil(&lock, Clock::now() + kDelivery, [&] { return !peers_.Busy(); });
  peers_.Close();
  return !failed_for_good_ || peers_.AllHaveLeft();
}

// Returns true if a rank that has left need not wait for the others any longer.
bool Table::MayClose(Departure* departure, Time now) {
  Serve();
  if (peers_.AllHaveLeft()) return true;
  if (failed_for_good_) return now - departure->healthy >= departure->patience_after_failure;
  departure->healthy = now;
  if (!departure->is_reported && now - departure->start >= departure->patience) {
    departure->is_reported = true;
    std::fprintf(stderr, "%s\n", StayingReport(peers_.rank(), peers_.Staying()).c_str());
  }
  return false;
}

}  // namespace syncbn
