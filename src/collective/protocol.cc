// Exchanges: beginning, carrying parts, ending. protocol_control.cc has the rest.
#include "collective/protocol.h"

#include <numeric>

#include "collective/process_report.h"
#include "collective/timeout.h"
#include "core/error.h"

namespace syncbn {
namespace {

// More finished exchanges than any rank is ahead of another one.
constexpr size_t kRemembered = 64;

std::vector<int> AllRanks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

Protocol::Protocol(int rank, int size, std::function<void(int, Bytes)> send)
    : rank_(rank), size_(size), send_(std::move(send)) {}

std::unique_ptr<Exchange> Protocol::MakeExchange(Contribution* own, bool empty) const {
  if (own->ranks.empty()) own->ranks = AllRanks(size_);
  for (int rank : own->ranks) {
    if (0 <= rank && rank < size_) continue;
    throw Error(Concat(own->title, ": names the rank ", rank, ", expected 0 to ", size_ - 1));
  }
  Part part{empty, std::move(own->payload)};
  return std::make_unique<Exchange>(own->ranks, rank_, std::move(part), FindMerger(own->merger));
}

std::shared_ptr<Protocol::Pending> Protocol::Begin(Contribution own, Time now) {
  CheckUsable(own.title);
  std::unique_ptr<Exchange> exchange = MakeExchange(&own, false);
  std::shared_ptr<Pending>& slot = exchanges_[own.key];
  if (!slot) slot = std::make_shared<Pending>();
  const std::shared_ptr<Pending> pending = slot;
  if (pending->exchange) throw Error(Concat(own.title, ": this rank came twice to one exchange"));
  ++taken_part_;
  last_title_ = own.title;
  pending->waits = true;
  pending->begun = now;
  pending->deadline = now + ToDuration(own.timeout_seconds);
  Start(pending, std::move(own), std::move(exchange));
  return pending;
}

Bytes Protocol::Result(Pending* pending) {
  if (!pending->error.empty()) throw Error(pending->error);
  return std::move(pending->exchange->result());
}

// This process has joined: it brings an empty part to whatever the others begin.
void Protocol::JoinIn(const std::shared_ptr<Pending>& pending) {
  const Message& message = pending->early.front().second;
  Contribution own;
  own.key = message.key;
  own.title = message.title;
  own.contract = message.contract;
  own.merger = message.merger;
  own.ranks = RanksOf(message);
  std::unique_ptr<Exchange> exchange = MakeExchange(&own, true);
  Start(pending, std::move(own), std::move(exchange));
}

void Protocol::Start(const std::shared_ptr<Pending>& pending, Contribution own,
                     std::unique_ptr<Exchange> exchange) {
  pending->own = std::move(own);
  pending->exchange = std::move(exchange);
  const auto queries = queries_.equal_range(pending->own.key);
  for (auto query = queries.first; query != queries.second; ++query) {
    Send(query->second.first, StatusFor(query->second.second));
  }
  queries_.erase(queries.first, queries.second);
  std::vector<std::pair<int, Message>> early;
  early.swap(pending->early);
  for (auto& message : early) Take(pending.get(), message.first, std::move(message.second));
  Advance(pending);
}

void Protocol::HandlePart(int from, Message message) {
  if (!exchanges_.count(message.key)) {
    for (const Contribution& finished : finished_) {
      if (finished.key != message.key) continue;
      // An invitation can come too late; a part cannot.
      if (message.step != kInvitation) {
        Fail(ContractsDifferReport(finished, rank_, from, message, RanksOf(message)));
      }
      return;
    }
    exchanges_[message.key] = std::make_shared<Pending>();
  }
  const std::shared_ptr<Pending> pending = exchanges_[message.key];
  if (!pending->exchange) {
    pending->early.emplace_back(from, std::move(message));
    if (joining_) JoinIn(pending);
    return;
  }
  Take(pending.get(), from, std::move(message));
  Advance(pending);
}

void Protocol::Take(Pending* pending, int from, Message message) {
  const Contribution& own = pending->own;
  const std::vector<int> ranks = RanksOf(message);
  if (message.contract != own.contract || message.merger != own.merger || ranks != own.ranks) {
    Fail(ContractsDifferReport(own, rank_, from, message, ranks));
  } else if (message.step != kInvitation) {
    pending->exchange->Take(from, message.step, {message.empty, std::move(message.payload)});
  }
}

// Goes on as far as the parts reach.
void Protocol::Advance(const std::shared_ptr<Pending>& pending) {
  if (!failure_.empty() || leaving_) return;
  try {
    for (Exchange::Outgoing& out : pending->exchange->Advance()) {
      Message message = PartOf(*pending, out.step);
      message.empty = out.part.empty;
      message.payload = std::move(out.part.payload);
      Send(out.to, message);
    }
  } catch (const Error& error) {  // parts that do not fit together
    return Fail(Concat(pending->own.title, ": ", error.what()));
  }
  CheckAwaited(pending.get());
  if (pending->exchange->done()) Remember(pending);
}

void Protocol::CheckAwaited(Pending* pending) {
  const int awaited = pending->exchange->awaited();
  if (left_.count(awaited)) {
    Fail(RankLeftReport(pending->own, awaited));
  } else if (joined_.count(awaited) && !pending->invited) {
    // It would begin only when a part comes, but in this exchange it has to hand over the first.
    pending->invited = true;
    Send(awaited, PartOf(*pending, kInvitation));
  }
}

void Protocol::Remember(const std::shared_ptr<Pending>& pending) {
  finished_.push_back(pending->own);
  if (finished_.size() > kRemembered) finished_.pop_front();
  exchanges_.erase(pending->own.key);
}

Message Protocol::PartOf(const Pending& pending, int step) const {
  Message message;
  message.era = era_;
  message.step = step;
  message.key = pending.own.key;
  message.title = pending.own.title;
  message.contract = pending.own.contract;
  message.merger = pending.own.merger;
  if (static_cast<int>(pending.own.ranks.size()) < size_) {
    message.ranks.assign(pending.own.ranks.begin(), pending.own.ranks.end());
  }
  return message;
}

std::vector<int> Protocol::RanksOf(const Message& message) const {
  if (message.ranks.empty()) return AllRanks(size_);
  return std::vector<int>(message.ranks.begin(), message.ranks.end());
}

// ---- messages ----------------------------------------------------------------------------------

void Protocol::Handle(int from, const Bytes& bytes, Time now) {
  FailIfThrows([&] { Dispatch(from, Decode(bytes), now); });
}

// Throws Error for what no process of this program sends.
void Protocol::Dispatch(int from, Message message, Time now) {
  if (message.kind == MessageKind::kStatus) {
    const auto asked = questions_.find(message.number);
    const auto question = asked == questions_.end() ? nullptr : asked->second.lock();
    if (question) question->answers[from] = std::move(message);
    return;
  }
  heard_ = now;
  if (message.kind == MessageKind::kQuery) return HandleQuery(from, std::move(message));
  if (message.kind == MessageKind::kLeave) {
    left_.insert(from);
    return CheckLeavers();
  }
  // A failure is of a whole generation.
  if (message.kind == MessageKind::kFail && message.era.generation == era_.generation) {
    return SetFailure(RankFailedReport(from, message.contract));
  }
  if (message.era < era_) return;
  if (era_ < message.era) {
    future_.emplace_back(from, std::move(message));
  } else if (message.kind == MessageKind::kJoin) {
    HandleJoin(from, message.number);
  } else {
    HandlePart(from, std::move(message));
  }
}

void Protocol::Send(int to, const Message& message) {
  try {
    send_(to, Encode(message));
  } catch (const std::exception& error) {
    Fail(Concat("sending to rank ", to, " failed: ", error.what()));
  }
}

void Protocol::SendAll(const Message& message) {
  for (int to : OthersBut(left_)) Send(to, message);
}

}  // namespace syncbn
