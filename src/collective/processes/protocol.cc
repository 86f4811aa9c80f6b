// Exchanges: their begin, their parts, their end. protocol_control.cc has the rest.
#include "collective/processes/protocol.h"

#include <numeric>

#include "collective/processes/report.h"
#include "core/error.h"

namespace syncbn {
namespace {

// More finished exchanges than one rank can be ahead of another.
constexpr size_t kRemembered = 64;

std::vector<int> AllRanks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

Protocol::Protocol(int rank, int size, std::function<void(int, Bytes)> send)
    : ranks_{rank, size},
      send_(std::move(send)),
      queries_([this](int to, Message message) { Send(to, std::move(message)); }),
      joining_(ranks_, &queries_),
      leaving_(ranks_, &queries_) {}

std::unique_ptr<Exchange> Protocol::MakeExchange(Contribution* own, bool empty) const {
  if (own->ranks.empty()) own->ranks = AllRanks(ranks_.size);
  for (int rank : own->ranks) {
    if (0 <= rank && rank < ranks_.size) continue;
    throw Error(Concat(own->title, ": names the rank ", rank, ", expected 0 to ", ranks_.size - 1));
  }
  Part part{empty, std::move(own->payload)};
  return std::make_unique<Exchange>(own->ranks, ranks_.own, std::move(part),
                                    own->operation);
}

std::shared_ptr<PendingExchange> Protocol::Begin(Contribution own, Time now) {
  CheckUsable(own.title);
  std::unique_ptr<Exchange> exchange = MakeExchange(&own, false);
  Pending& slot = exchanges_[own.key];
  if (!slot) slot = std::make_shared<PendingExchange>();
  const Pending pending = slot;
  if (pending->exchange) throw Error(Concat(own.title, ": this rank began one exchange twice"));
  ++taken_part_;
  last_title_ = own.title;
  pending->waits = true;
  pending->begun = now;
  pending->deadline = now + ToDuration(own.timeout_seconds);
  Start(pending, std::move(own), std::move(exchange));
  return pending;
}

// This process has joined: it contributes an empty part to whatever the others begin.
void Protocol::JoinIn(const Pending& pending) {
  const Message& message = pending->early.front().second;
  Contribution own{message.key,       message.title,    message.signature,
                   message.operation, RanksOf(message), 0, {}};
  std::unique_ptr<Exchange> exchange = MakeExchange(&own, true);
  Start(pending, std::move(own), std::move(exchange));
}

void Protocol::Start(const Pending& pending, Contribution own,
                     std::unique_ptr<Exchange> exchange) {
  pending->own = std::move(own);
  pending->exchange = std::move(exchange);
  for (const auto& query : queries_.Load(pending->own.key)) {
    Send(query.first, StatusFor(query.second));
  }
  std::vector<std::pair<int, Message>> early;
  early.swap(pending->early);
  for (auto& message : early) Take(pending.get(), message.first, std::move(message.second));
  Advance(pending);
}

void Protocol::HandlePart(int from, Message message) {
  if (!exchanges_.count(message.key)) {
    for (const Contribution& finished : finished_) {
      if (finished.key != message.key) continue;
      // An invitation may be too late; a part cannot.
      if (message.step != kInvitation) {
        Fail(SignaturesDifferReport(finished, ranks_.own, from, message, RanksOf(message)));
      }
      return;
    }
    exchanges_[message.key] = std::make_shared<PendingExchange>();
  }
  const Pending pending = exchanges_[message.key];
  if (!pending->exchange) {
    pending->early.emplace_back(from, std::move(message));
    if (joining_.active()) JoinIn(pending);
    return;
  }
  Take(pending.get(), from, std::move(message));
  Advance(pending);
}

void Protocol::Take(PendingExchange* pending, int from, Message message) {
  const Contribution& own = pending->own;
  const std::vector<int> ranks = RanksOf(message);
  if (message.signature != own.signature || message.operation != own.operation ||
      ranks != own.ranks) {
    Fail(SignaturesDifferReport(own, ranks_.own, from, message, ranks));
  } else if (message.step != kInvitation) {
    pending->exchange->Take(from, message.step, {message.empty != 0, std::move(message.payload)});
  }
}

// Reduces and sends as far as the parts reach.
void Protocol::Advance(const Pending& pending) {
  if (!failure_.empty() || leaving_.begun()) return;
  try {
    for (Exchange::Outgoing& out : pending->exchange->Advance()) {
      Message message = PartOf(*pending, out.step);
      message.empty = out.part.empty;
      message.payload = std::move(out.part.payload);
      Send(out.to, std::move(message));
    }
  } catch (const Error& error) {  // parts that do not fit together
    return Fail(Concat(pending->own.title, ": ", error.what()));
  }
  CheckAwaited(pending.get());
  if (!pending->exchange->done()) return;
  finished_.push_back(pending->own);
  if (finished_.size() > kRemembered) finished_.pop_front();
  exchanges_.erase(pending->own.key);
}

void Protocol::CheckAwaited(PendingExchange* pending) {
  const int awaited = pending->exchange->awaited();
  if (leaving_.left().count(awaited)) {
    Fail(RankLeftReport(pending->own.title, awaited));
  } else if (joining_.Has(awaited) && !pending->invited) {
    // It begins when a part arrives, but in this exchange its own part comes first.
    pending->invited = true;
    Send(awaited, PartOf(*pending, kInvitation));
  }
}

void Protocol::CheckAllAwaited() {
  for (const auto& entry : exchanges_) {
    if (entry.second->exchange) CheckAwaited(entry.second.get());
  }
}

Message Protocol::PartOf(const PendingExchange& pending, int step) const {
  Message message;
  message.step = step;
  message.key = pending.own.key;
  message.title = pending.own.title;
  message.signature = pending.own.signature;
  message.operation = pending.own.operation;
  if (static_cast<int>(pending.own.ranks.size()) < ranks_.size) {
    message.ranks.assign(pending.own.ranks.begin(), pending.own.ranks.end());
  }
  return message;
}

std::vector<int> Protocol::RanksOf(const Message& message) const {
  if (message.ranks.empty()) return AllRanks(ranks_.size);
  return std::vector<int>(message.ranks.begin(), message.ranks.end());
}

// ---- messages ----------------------------------------------------------------------------------

void Protocol::Handle(int from, const Bytes& bytes, Time now) {
  FailIfThrows([&] {
    Message message = Decode(bytes);
    if (message.kind != MessageKind::kStatus) {
      joining_.Hear(now);
      Dispatch(from, std::move(message));
    } else {
      queries_.HandleAnswer(from, std::move(message));
    }
  });
}

// Throws Error for a message that no process of this program sends.
void Protocol::Dispatch(int from, Message message) {
  if (message.kind == MessageKind::kQuery) return HandleQuery(from, std::move(message));
  if (message.kind == MessageKind::kLeave) {
    leaving_.Add(from);
    return CheckLeavers();
  }
  // A failure is one of all generations between two recoveries.
  if (message.kind == MessageKind::kFail &&
      message.generation.recoveries == generation_.recoveries) {
    return SetFailure(RankFailedReport(from, message.text));
  }
  if (message.generation < generation_) return;
  if (generation_ < message.generation) {
    future_.emplace_back(from, std::move(message));
  } else if (message.kind == MessageKind::kJoin) {
    HandleJoin(from, message.number);
  } else {
    HandlePart(from, std::move(message));
  }
}

void Protocol::Send(int to, Message message) {
  message.generation = generation_;
  try {
    send_(to, Encode(message));
  } catch (const std::exception& error) {
    Fail(Concat("sending to rank ", to, " failed: ", error.what()));
  }
}

void Protocol::SendAll(const Message& message) {
  for (int to : ranks_.OthersBut(leaving_.left())) Send(to, message);
}

void Protocol::FailIfThrows(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    Fail(error.what());
  }
}

}  // namespace syncbn
