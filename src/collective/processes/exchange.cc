// The schedule of recursive doubling, and its execution as parts arrive.
#include "collective/processes/exchange.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "core/error.h"

namespace syncbn {
namespace {

// Steps tell the parts of one exchange apart: round j is kRound + j.
constexpr int kHandOver = 0, kResult = 1, kRound = 2;

}  // namespace

Exchange::Exchange(std::vector<int> ranks, int own, Part own_part, ReduceOperation operation)
    : ranks_(std::move(ranks)), operation_(operation), part_(std::move(own_part)) {
  if (std::adjacent_find(ranks_.begin(), ranks_.end(), std::greater_equal<int>()) != ranks_.end()) {
    throw Error("the ranks of an exchange do not ascend");
  }
  const auto place = std::lower_bound(ranks_.begin(), ranks_.end(), own);
  if (place == ranks_.end() || *place != own) {
    throw Error(Concat("rank ", own, " begins an exchange that it is not a member of"));
  }
  begin_ = static_cast<int>(place - ranks_.begin());
  end_ = begin_ + 1;
  Plan(begin_);
}

void Exchange::Plan(int own) {
  const int size = static_cast<int>(ranks_.size());
  int doubled = 1;  // the largest power of two
  while (2 * doubled <= size) doubled *= 2;
  const int pairs = size - doubled;  // of neighbours that begin as one
  const bool paired = own < 2 * pairs;
  if (paired && own % 2 == 1) {
    schedule_.push_back({own - 1, kHandOver, true, false, own, own + 1});
    schedule_.push_back({own - 1, kResult, false, true, 0, size});
    return;
  }
  if (paired) {
    schedule_.push_back({own + 1, kHandOver, false, true, own, own + 2});
  }
  const int number = paired ? own / 2 : own - pairs;
  const auto position = [&](int n) { return n < pairs ? 2 * n : n + pairs; };
  for (int round = 0, bit = 1; bit < doubled; ++round, bit *= 2) {
    const int peer = number ^ bit;
    const int first = number / (2 * bit) * (2 * bit);
    schedule_.push_back(
        {position(peer), kRound + round, true, true, position(first), position(first + 2 * bit)});
  }
  if (paired) schedule_.push_back({own + 1, kResult, true, false, 0, size});
}

void Exchange::Take(int from, int step, Part part) { inbox_[step] = {from, std::move(part)}; }

std::vector<Exchange::Outgoing> Exchange::Advance() {
  std::vector<Outgoing> outgoing;
  while (!done()) {
    const Action& action = schedule_[next_];
    if (action.send && !sent_) {
      outgoing.push_back({ranks_[action.peer], action.step, part_});
      sent_ = true;
    }
    if (action.receive) {
      const auto arrived = inbox_.find(action.step);
      if (arrived == inbox_.end()) break;
      if (arrived->second.first != ranks_[action.peer]) {
        throw Error(Concat("rank ", arrived->second.first, " sent what was expected from rank ",
                           ranks_[action.peer]));
      }
      Merge(std::move(arrived->second.second), action);
      inbox_.erase(arrived);
    }
    begin_ = action.begin;
    end_ = action.end;
    sent_ = false;
    ++next_;
  }
  return outgoing;
}

void Exchange::Merge(Part other, const Action& action) {
  if (other.empty) return;
  if (part_.empty || action.step == kResult) {
    part_ = std::move(other);
    return;
  }
  if (action.peer < begin_) std::swap(part_, other);
  Reduce(operation_, other.payload, &part_.payload);
}

int Exchange::awaited() const {
  return done() || !schedule_[next_].receive ? -1 : ranks_[schedule_[next_].peer];
}

std::vector<int> Exchange::Outstanding() const {
  std::vector<int> ranks = ranks_;
  ranks.erase(ranks.begin() + begin_, ranks.begin() + end_);
  return ranks;
}

}  // namespace syncbn
