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

Message PartOf(const Agreement& agreement, int step) {
  Message message;
  static_cast<Agreement&>(message) = agreement;
  message.step = step;
  return message;
}

std::vector<Received> Take(const std::string& key, ReceivedByKey* from) {
  auto node = from->extract(key);
  return node.empty() ? std::vector<Received>() : std::move(node.mapped());
}

}  // namespace

Protocol::Protocol(int rank, int size, std::function<void(int, Bytes)> send)
    : ranks_{rank, size},
      send_(std::move(send)),
      queries_([this](int to, Message message) { Send(to, std::move(message)); }),
      joining_(ranks_, &queries_),
      leaving_(ranks_, &queries_) {}

Protocol::Pending Protocol::Make(Contribution own, bool empty) const {
  if (own.ranks.empty()) own.ranks = AllRanks(ranks_.size);
  for (int rank : own.ranks) {
    if (0 <= rank && rank < ranks_.size) continue;
    throw Error(Concat(own.title, ": names the rank ", rank, ", expected 0 to ", ranks_.size - 1));
  }
  const Pending pending = std::make_shared<PendingExchange>();
  Part part{empty, std::move(own.payload)};
  pending->exchange =
      std::make_unique<Exchange>(own.ranks, ranks_.own, std::move(part), own.operation);
  pending->own = std::move(own);
  return pending;
}

std::shared_ptr<PendingExchange> Protocol::Begin(Contribution own, Time now) {
  CheckUsable(own.title);
  if (exchanges_.count(own.key)) {
    throw Error(Concat(own.title, ": this rank began one exchange twice"));
  }
  const Pending pending = Make(std::move(own), false);
  ++taken_part_;
  last_title_ = pending->own.title;
  pending->waits = true;
  pending->begun = now;
  pending->deadline = now + ToDuration(pending->own.timeout_seconds);
  Start(pending);
  return pending;
}

// This process has joined: it contributes an empty part to what others have begun.
void Protocol::JoinIn(const std::string& key) {
  Contribution own;
  static_cast<Agreement&>(own) = early_.at(key).front().message;
  Start(Make(std::move(own), true));
}

void Protocol::Start(const Pending& pending) {
  const std::string& key = pending->own.key;
  exchanges_[key] = pending;
  for (const Received& query : Take(key, &questions_)) Send(query.from, StatusFor(query.message));
  for (Received& part : Take(key, &early_)) {
    TakePart(pending.get(), part.from, std::move(part.message));
  }
  Advance(pending);
}

void Protocol::HandlePart(int from, Message message) {
  if (message.ranks.empty()) message.ranks = AllRanks(ranks_.size);
  const auto begun = exchanges_.find(message.key);
  if (begun != exchanges_.end()) {
    const Pending pending = begun->second;
    TakePart(pending.get(), from, std::move(message));
    return Advance(pending);
  }
  for (const Agreement& finished : finished_) {
    if (finished.key != message.key) continue;
    // An invitation may be too late; a part cannot.
    if (message.step == kInvitation) return;
    return Fail(SignaturesDifferReport(finished, ranks_.own, message, from));
  }
  const std::string key = message.key;
  early_[key].push_back({from, std::move(message)});
  if (joining_.active()) JoinIn(key);
}

void Protocol::TakePart(PendingExchange* pending, int from, Message message) {
  const Contribution& own = pending->own;
  if (message.signature != own.signature || message.operation != own.operation ||
      message.ranks != own.ranks) {
    Fail(SignaturesDifferReport(own, ranks_.own, message, from));
  } else if (message.step != kInvitation) {
    pending->exchange->Take(from, message.step, {message.empty != 0, std::move(message.payload)});
  }
}

// Reduces and sends as far as the parts reach.
void Protocol::Advance(const Pending& pending) {
  if (!failure_.empty() || leaving_.begun()) return;
  try {
    for (Exchange::Outgoing& out : pending->exchange->Advance()) {
      Message message = PartOf(pending->own, out.step);
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
    Send(awaited, PartOf(pending->own, kInvitation));
  }
}

void Protocol::CheckAllAwaited() {
  for (const auto& entry : exchanges_) CheckAwaited(entry.second.get());
}

// ---- messages ----------------------------------------------------------------------------------

void Protocol::Handle(int from, const Bytes& bytes, Time now) {
  FailIfThrows([&] {
    Message message = Decode(bytes);
    if (message.kind == MessageKind::kStatus) {
      return queries_.HandleAnswer(from, std::move(message));
    }
    joining_.Hear(now);
    Dispatch(from, std::move(message));
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
    SetFailure(RankFailedReport(from, message.text));
    return;
  }
  if (message.generation < generation_) return;
  if (generation_ < message.generation) {
    future_.push_back({from, std::move(message)});
  } else if (message.kind == MessageKind::kJoin) {
    HandleJoin(from, message.number);
  } else {
    HandlePart(from, std::move(message));
  }
}

void Protocol::Send(int to, Message message) {
  message.generation = generation_;
  if (static_cast<int>(message.ranks.size()) == ranks_.size) message.ranks.clear();  // all
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
