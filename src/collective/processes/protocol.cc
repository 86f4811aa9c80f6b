// In the order of an exchange's life: it begins, parts arrive, it is reduced and answered; then what
// ends it otherwise, leaving, and messages.
#include "collective/processes/protocol.h"

#include <algorithm>
#include <numeric>

#include "collective/processes/report.h"
#include "core/error.h"

namespace syncbn {
namespace {

// More finished exchanges than one rank can be ahead of another.
constexpr size_t kRemembered = 64;

// For the parent's answer, after a wait that took too long.
Duration AnswerTime(Duration timeout) {
  return std::min<Duration>(timeout / 2, std::chrono::seconds(2));
}

bool Agree(const Agreement& a, const Agreement& b) {
  return a.signature == b.signature && a.operation == b.operation && a.ranks == b.ranks;
}

bool Contains(const std::vector<int>& ranks, int rank) {
  return std::binary_search(ranks.begin(), ranks.end(), rank);
}

int PositionOf(int rank, const std::vector<int>& ranks) {
  return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

std::vector<int> AllRanks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// An error that began with this wait needs no title in front.
std::string ErrorOf(const std::string& title, const std::string& failure) {
  const bool own = failure.compare(0, title.size(), title) == 0;
  return own ? failure : Concat(title, ": ", failure);
}

}  // namespace

Protocol::Protocol(int rank, int size, std::function<void(int, Bytes)> send)
    : rank_(rank), size_(size), send_(std::move(send)) {}

// ---- an exchange -------------------------------------------------------------------------------

std::shared_ptr<Exchange> Protocol::Begin(Contribution own, Time now) {
  CheckUsable(own.title);
  if (own.ranks.empty()) own.ranks = AllRanks(size_);
  for (int rank : own.ranks) {
    if (0 <= rank && rank < size_) continue;
    throw Error(Concat(own.title, ": names the rank ", rank, ", expected 0 to ", size_ - 1));
  }
  if (!Contains(own.ranks, rank_)) {
    throw Error(Concat(own.title, ": synchronizes other ranks, but this is rank ", rank_,
                       ". Was its symbol exported in a process of another group?"));
  }
  Exchange* const exchange = Find(own, rank_);
  if (exchange == nullptr) throw Error(ErrorOf(own.title, failure_));
  if (exchange->begun) throw Error(Concat(own.title, ": this rank began one exchange twice"));
  const Duration timeout = ToDuration(own.timeout_seconds);
  exchange->begun = true;
  exchange->late = false;
  exchange->start = now;
  exchange->deadline = now + timeout;
  exchange->parts[rank_] = std::move(own.payload);
  const Shared kept = exchanges_.at(own.key);
  Advance(own.key);
  return kept;
}

// The exchange of this key; null, after a failure, if another rank has agreed on another one.
Exchange* Protocol::Find(const Agreement& agreement, int from) {
  const auto finished = finished_.find(agreement.key);
  if (finished != finished_.end()) {
    Fail(SignaturesDifferReport(finished->second, rank_, agreement, from));
    return nullptr;
  }
  Shared& exchange = exchanges_[agreement.key];
  if (!exchange) {
    exchange = std::make_shared<Exchange>();
    exchange->agreement = agreement;
    const int position = PositionOf(rank_, agreement.ranks);
    exchange->subtrees = ChildrenOf(position, static_cast<int>(agreement.ranks.size()));
    exchange->subtrees.insert(exchange->subtrees.begin(), {position, position + 1});
  } else if (!Agree(exchange->agreement, agreement)) {
    const int other = exchange->begun ? rank_ : exchange->parts.begin()->first;
    Fail(SignaturesDifferReport(exchange->agreement, other, agreement, from));
    return nullptr;
  }
  return exchange.get();
}

// Reduces and sends if all parts are here.
void Protocol::Advance(const std::string& key) {
  const Shared exchange = exchanges_.at(key);
  if (!failure_.empty() || leaving_ || exchange->sent) return;
  if (exchange->parts.size() < exchange->subtrees.size()) return CheckLeft(*exchange);
  auto part = exchange->parts.begin();
  Bytes reduced = std::move(part->second);
  try {
    while (++part != exchange->parts.end()) {
      Reduce(exchange->agreement.operation, part->second, &reduced);
    }
  } catch (const Error& error) {  // parts that do not fit together
    return Fail(Concat(exchange->agreement.title, ": ", error.what()));
  }
  exchange->sent = true;
  if (exchange->agreement.ranks.front() == rank_) {
    exchange->result = std::move(reduced);
    return Answer(key);
  }
  Message message;
  static_cast<Agreement&>(message) = exchange->agreement;
  message.payload = std::move(reduced);
  Send(Parent(*exchange), std::move(message));
  CheckLeft(*exchange);
}

// Passes the result on.
void Protocol::Answer(const std::string& key) {
  const Shared exchange = exchanges_.at(key);
  for (const Subtree& subtree : exchange->subtrees) {
    const int to = exchange->agreement.ranks[subtree.begin];
    if (to == rank_) continue;
    Message message(MessageKind::kResult);
    message.key = key;
    message.payload = exchange->result;
    Send(to, std::move(message));
  }
  exchange->done = true;
  finished_.emplace(key, std::move(exchange->agreement));
  finished_keys_.push_back(key);
  if (finished_keys_.size() > kRemembered) {
    finished_.erase(finished_keys_.front());
    finished_keys_.pop_front();
  }
  exchanges_.erase(key);
}

int Protocol::Parent(const Exchange& exchange) const {
  const std::vector<int>& ranks = exchange.agreement.ranks;
  return ranks[ParentOf(PositionOf(rank_, ranks))];
}

bool Protocol::IsChild(int rank, const Exchange& exchange) const {
  return rank != rank_ && std::any_of(exchange.subtrees.begin(), exchange.subtrees.end(),
                                      [&](const Subtree& subtree) {
                                        return exchange.agreement.ranks[subtree.begin] == rank;
                                      });
}

// The subtrees whose part is missing.
std::vector<Subtree> Protocol::Awaited(const Exchange& exchange) const {
  std::vector<Subtree> awaited;
  for (const Subtree& subtree : exchange.subtrees) {
    const int rank = exchange.agreement.ranks[subtree.begin];
    if (!exchange.parts.count(rank)) awaited.push_back(subtree);
  }
  return awaited;
}

// ---- other ends --------------------------------------------------------------------------------

void Protocol::Tick(Time now) {
  for (const auto& entry : exchanges_) {
    const Shared exchange = entry.second;
    if (!(exchange->begun || exchange->late) || now < exchange->deadline) continue;
    const Duration patience = AnswerTime(exchange->deadline - exchange->start);
    return EndWait(exchange.get(), now - exchange->start, now + patience);
  }
}

// Time is over. Those who may know more of who is missing are asked, if there are any: they fail.
void Protocol::EndWait(Exchange* exchange, Duration waited, Time deadline) {
  std::vector<int> asked;
  if (exchange->sent) asked.push_back(Parent(*exchange));
  for (const Subtree& subtree : Awaited(*exchange)) {
    const bool is_known = subtree.end - subtree.begin == 1;
    if (is_known) return Fail(MissingReport(*exchange, ToSeconds(waited)));
    asked.push_back(exchange->agreement.ranks[subtree.begin]);
  }
  if (exchange->late) return Fail(MissingReport(*exchange, ToSeconds(waited)));
  exchange->late = true;
  exchange->deadline = deadline;
  Message message(MessageKind::kLate);
  message.key = exchange->agreement.key;
  message.number = static_cast<int64_t>(1e3 * ToSeconds(waited));
  for (int rank : asked) Send(rank, message);
}

// The time of a child or of the parent is over.
void Protocol::HandleLate(int from, const Message& message, Time now) {
  const auto found = exchanges_.find(message.key);
  if (found == exchanges_.end()) return;  // not begun, or the result is on its way
  const Shared exchange = found->second;
  if (exchange->sent) {
    if (from != Parent(*exchange)) Send(Parent(*exchange), message);
    return;
  }
  if (exchange->late) return;  // others were asked already
  const std::chrono::milliseconds waited(message.number);
  if (!exchange->begun) exchange->start = now - waited;
  EndWait(exchange.get(), waited, now + AnswerTime(waited) / 2);  // before its patience ends
}

std::string Protocol::MissingReport(const Exchange& exchange, double seconds) const {
  const std::vector<int>& ranks = exchange.agreement.ranks;
  if (exchange.sent) {
    return RanksMissingReport(exchange.agreement, {rank_},
                              {Concat("rank ", Parent(exchange), ", which does not answer: it "
                                      "computes, has left the loop or has died")}, seconds);
  }
  std::set<int> present(ranks.begin(), ranks.end());
  std::vector<std::string> missing;
  for (const Subtree& subtree : Awaited(exchange)) {
    for (int i = subtree.begin; i < subtree.end; ++i) present.erase(ranks[i]);
    std::string known = WhatIsKnownOf(ranks[subtree.begin]);
    if (subtree.end - subtree.begin > 1) {
      known += Concat(" (it sends for ", subtree.end - subtree.begin, " ranks)");
    }
    missing.push_back(std::move(known));
  }
  return RanksMissingReport(exchange.agreement, {present.begin(), present.end()}, missing, seconds);
}

std::string Protocol::WhatIsKnownOf(int rank) const {
  for (const auto& entry : exchanges_) {
    const bool waits = rank == rank_ ? entry.second->begun : entry.second->parts.count(rank) > 0;
    if (waits) return Concat("rank ", rank, ", which waits in ", entry.second->agreement.title);
  }
  if (rank == rank_) return Concat("rank ", rank, ", which waits in no exchange");
  const auto latest = latest_titles_.find(rank);
  return Concat("rank ", rank, ", which has sent nothing ",
                latest == latest_titles_.end() ? "yet" : "since " + latest->second);
}

void Protocol::Fail(const std::string& text) {
  if (!SetFailure(text)) return;
  Message message(MessageKind::kFail);
  message.text = failure_;
  SendAll(message);
}

// False if that changes nothing.
bool Protocol::SetFailure(std::string text) {
  if (!failure_.empty() || leaving_) return false;
  const std::string frozen = FrozenClause(text);
  if (!frozen.empty()) text += Concat("\nRank ", rank_, " ", frozen, ".");
  failure_ = std::move(text);
  EndWaits(failure_);
  return true;
}

void Protocol::EndWaits(const std::string& reason) {
  for (const auto& entry : exchanges_) {
    entry.second->error = ErrorOf(entry.second->agreement.title, reason);
  }
  exchanges_.clear();
}

void Protocol::CheckUsable(const std::string& title) const {
  if (leaving_) {
    throw Error(Concat(title, ": called after ", kShutdown, ", or while MPI or the program ends"));
  }
  if (!failure_.empty()) {
    throw Error(Concat(title, ": stopped because of an earlier error: ", failure_));
  }
}

// ---- leaving -----------------------------------------------------------------------------------

// To those that have left, too: they wait for it.
void Protocol::Leave() {
  if (leaving_) return;
  for (int to = 0; to < size_; ++to) {
    if (to != rank_) Send(to, Message(MessageKind::kLeave));
  }
  leaving_ = true;
  EndWaits("the program ends");
}

// A rank that has left sends no part, and no result.
void Protocol::CheckLeft(const Exchange& exchange) {
  if (left_.empty() || !exchange.begun) return;
  const std::vector<int>& ranks = exchange.agreement.ranks;
  std::vector<int> needed;
  for (const Subtree& subtree : Awaited(exchange)) needed.push_back(ranks[subtree.begin]);
  if (exchange.sent) needed.push_back(Parent(exchange));
  for (int rank : needed) {
    if (left_.count(rank)) return Fail(RankLeftReport(exchange.agreement.title, rank));
  }
}

// Backward's keys begin with those of forward.
std::string Protocol::NextKey(const std::string& name) {
  return Concat(name, '|', numbers_[name]++);
}

// ---- messages ----------------------------------------------------------------------------------

void Protocol::Handle(int from, const Bytes& bytes, Time now) {
  try {
    Message message = Decode(bytes);
    if (message.kind == MessageKind::kFail) {
      SetFailure(RankFailedReport(from, message.text));
    } else if (message.kind == MessageKind::kLeave) {
      left_.insert(from);
      const std::map<std::string, Shared> exchanges = exchanges_;
      for (const auto& entry : exchanges) CheckLeft(*entry.second);
    } else if (!failure_.empty() || leaving_) {
      return;
    } else if (message.kind == MessageKind::kLate) {
      HandleLate(from, message, now);
    } else if (message.kind == MessageKind::kPart) {
      if (message.ranks.empty()) message.ranks = AllRanks(size_);
      if (message.ranks.back() >= size_ || !Contains(message.ranks, rank_)) Refuse();
      latest_titles_[from] = message.title;
      Exchange* const exchange = Find(message, from);
      if (exchange == nullptr) return;
      if (!IsChild(from, *exchange)) Refuse();
      exchange->parts[from] = std::move(message.payload);
      Advance(message.key);
    } else if (exchanges_.count(message.key)) {
      const Exchange& exchange = *exchanges_.at(message.key);
      if (!exchange.sent || from != Parent(exchange)) Refuse();
      exchanges_.at(message.key)->result = std::move(message.payload);
      Answer(message.key);
    }
  } catch (const std::exception& error) {
    Fail(error.what());
  }
}

void Protocol::Send(int to, Message message) {
  if (static_cast<int>(message.ranks.size()) == size_) message.ranks.clear();  // all
  try {
    send_(to, Encode(message));
  } catch (const std::exception& error) {
    Fail(Concat("sending to rank ", to, " failed: ", error.what()));
  }
}

void Protocol::SendAll(const Message& message) {
  for (int to = 0; to < size_; ++to) {
    if (to != rank_ && !left_.count(to)) Send(to, message);
  }
}

}  // namespace syncbn
