// The protocol around exchanges: failure, generations, queries, joining and leaving.
#include <algorithm>

#include "collective/processes/protocol.h"
#include "collective/processes/report.h"
#include "core/error.h"

namespace syncbn {
namespace {

// An error that began with this wait needs no title in front.
std::string ErrorOf(const std::string& title, const std::string& failure) {
  const bool own = failure.compare(0, title.size(), title) == 0;
  return own ? failure : Concat(title, ": ", failure);
}

}  // namespace

void Protocol::CheckUsable(const std::string& title) const {
  if (leaving_.begun()) {
    throw Error(Concat(title, ": called after ", kShutdown, ", or while MPI or the "
                       "program ends"));
  }
  if (!failure_.empty()) {
    throw Error(Concat(title, ": stopped because of an earlier error: ", failure_));
  }
}

void Protocol::Tick(Time now) {
  for (const auto& entry : exchanges_) {
    PendingExchange* const pending = entry.second.get();
    if (!pending->waits || pending->over()) continue;
    const std::string failure = pending->CheckDeadline(now, &queries_);
    const std::string frozen = FrozenClause(failure);
    if (!failure.empty()) Fail(frozen.empty() ? failure : failure + " This rank " + frozen + ".");
  }
  const std::string failure = joining_.Tick(now);
  if (!failure.empty()) Fail(failure);
  leaving_.Tick(now);
}

bool Protocol::Idle() const {
  return exchanges_.empty() && early_.empty() && questions_.empty() && future_.empty() &&
         !joining_.active();
}

// ---- failure and generations -------------------------------------------------------------------

void Protocol::Fail(const std::string& text) {
  if (!SetFailure(text)) return;
  Message message(MessageKind::kFail);
  message.text = text;
  SendAll(message);
}

// False if that changes nothing.
bool Protocol::SetFailure(const std::string& text) {
  if (!failure_.empty() || leaving_.begun()) return false;
  failure_ = text;
  EndWaits(text);
  return true;
}

void Protocol::EndWaits(const std::string& reason) {
  for (const auto& entry : exchanges_) {
    PendingExchange* const pending = entry.second.get();
    if (pending->waits) pending->error = ErrorOf(pending->own.title, reason);
  }
  joining_.Fail(ErrorOf(kJoin, reason));
}

// To the newest generation that this process has heard of: those between have failed elsewhere, and
// ranks that went through them one by one might never be in the same one.
void Protocol::Reset() {
  if (failure_.empty()) return;
  int32_t recoveries = generation_.recoveries + 1;
  for (const Received& received : future_) {
    const bool failed = received.message.kind == MessageKind::kFail;
    recoveries = std::max(recoveries, received.message.generation.recoveries + failed);
  }
  StartGeneration({recoveries, 0}, failure_);
}

void Protocol::StartGeneration(Generation generation, const std::string& reason) {
  EndWaits(reason);
  generation_ = generation;
  failure_.clear();
  exchanges_.clear();
  early_.clear();
  questions_.clear();
  finished_.clear();
  numbers_.clear();
  joining_.Forget();
  taken_part_ = 0;
  std::vector<Received> future;
  future.swap(future_);
  for (Received& received : future) {
    FailIfThrows([&] { Dispatch(received.from, std::move(received.message)); });
  }
}

// Keys of a former generation must not be used again: a backward call may belong to a forward call
// of that one.
std::string Protocol::NextKey(const std::string& name) {
  return Concat(name, '|', generation_.recoveries, '.', generation_.joins, '.', numbers_[name]++);
}

// ---- queries -----------------------------------------------------------------------------------

// Answers now, and again when this process reaches the key.
void Protocol::HandleQuery(int from, Message query) {
  const Message status = StatusFor(query);
  Send(from, status);
  if (generation_ < query.generation) {
    future_.push_back({from, std::move(query)});
  } else if (status.step == 0 && query.generation == generation_ && !query.key.empty()) {
    questions_[query.key].push_back({from, query});
  }
}

Message Protocol::StatusFor(const Message& query) const {
  Message status(MessageKind::kStatus);
  status.number = query.number;
  const bool finished = std::any_of(finished_.begin(), finished_.end(),
                                    [&](const Agreement& own) { return own.key == query.key; });
  const bool reached = exchanges_.count(query.key) || finished || joining_.active();
  status.step = query.generation == generation_ && reached ? 1 : 0;
  std::vector<std::string> waits;
  for (const auto& entry : exchanges_) waits.push_back(entry.second->own.title);
  if (leaving_.begun()) {
    status.text = "has left";
  } else if (!failure_.empty()) {
    status.text = "has failed: " + failure_;
  } else if (generation_.recoveries < query.generation.recoveries) {
    status.text = "has not called gluon_syncbn.recover() yet";
  } else if (!waits.empty() || joining_.active()) {
    status.text = "waits in " + (waits.empty() ? kJoin : syncbn::Join(waits, " and in "));
  } else if (last_title_.empty()) {
    status.text = "runs, but has begun no exchange yet";
  } else {
    status.text = "runs, but is in no exchange; its latest was " + last_title_;
  }
  const std::string layer = query.key.substr(0, query.key.find('|'));
  const std::string frozen = FrozenClause(Concat('\'', layer, '\''));
  if (!frozen.empty()) status.text += ", and " + frozen;
  return status;
}

// ---- joining and leaving -----------------------------------------------------------------------

void Protocol::Join(double timeout_seconds, Time now) {
  CheckUsable(kJoin);
  joining_.Begin(timeout_seconds, now);
  Message message(MessageKind::kJoin);
  message.number = taken_part_;
  SendAll(message);
  const ReceivedByKey begun_by_others = early_;
  for (const auto& entry : begun_by_others) FailIfThrows([&] { JoinIn(entry.first); });
  if (joining_.active()) HandleJoin(ranks_.own, taken_part_);
  CheckLeavers();
}

void Protocol::HandleJoin(int from, int64_t number) {
  joining_.Add(from, number);
  CheckAllAwaited();
  if (!joining_.Complete()) return;
  const std::string reason =
      joining_.active() ? "all ranks have joined, this one too" : failure_;
  joining_.Finish();
  StartGeneration({generation_.recoveries, generation_.joins + 1}, reason);
}

void Protocol::CheckLeavers() {
  CheckAllAwaited();
  for (int rank : leaving_.left()) {
    if (!joining_.active() || joining_.Has(rank)) continue;
    Fail(RankLeftReport(kJoin, rank));
  }
}

void Protocol::Leave() {
  if (leaving_.begun()) return;
  leaving_.Begin(failure_.empty());
  for (int rank : ranks_.OthersBut({})) Send(rank, Message(MessageKind::kLeave));
  EndWaits("the program ends");
}

}  // namespace syncbn
