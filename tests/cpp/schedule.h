// A small program of some ranks, and one run of it: a sequence of actions on Tables. A device
// arrives, a message is received, a rank fails, leaves, stops, is late or recovers.
#pragma once
#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/program.h"
#include "ranks.h"

namespace schedule {

using syncbn::Contribution;
using syncbn::Numbers;
using syncbn::Operation;
using syncbn::Phase;
using syncbn::Ticket;
using syncbn::Time;

// ---- programs ----------------------------------------------------------------------------------

struct Call {
  Phase phase;
  int layer = 0;
  std::vector<int> ranks{};  // empty for all
  int channels = 1;
};

// A device's calls, in order. They begin when the actors of earlier stages of this rank are over.
// All devices of a rank take part, unless `devices` is set.
struct Actor {
  int rank, device;
  std::vector<Call> calls;
  int stage = 0;
  int devices = 0;
};

// The action of the culprit, at any time, once. A late device times out, while another action may
// happen in the moment in which Table::IsOver gives the mutex away.
enum class Fault { kNone, kTells, kFails, kStops, kLeaves, kIsLate, kRecovers, kDisagrees };

struct Program {
  std::string name;
  std::vector<int> devices;  // how many each rank has
  std::vector<Actor> actors;
  int arity = 32;
  Fault fault = Fault::kNone;
  int culprit = 0;

  int Ranks() const { return static_cast<int>(devices.size()); }
};

// ---- a run -------------------------------------------------------------------------------------

class Rank : public ::Rank {
 public:
  Rank(const std::shared_ptr<Network>& with, int rank, int arity) : ::Rank(with, rank, arity) {
    transport->sender = LocalTransport::kNone;
  }
  using Table::exchanges_;
  using Table::failed_for_good_;

  void Receive(int from) {
    Lock lock(mutex_);
    transport->sender = from;
    Serve();
  }
  bool AwaitsRanks() const {
    for (const auto& [key, exchange] : exchanges_) {
      if (!key.is_local && exchange->arrived > 0) return true;
    }
    return false;
  }
  void Describe(std::ostream* to) {
    *to << '#' << failed_for_good_ << resets_ << failure_ << HasLeft() << peers_.Staying().size();
    for (const auto& [key, exchange] : exchanges_) {
      *to << '<' << key.layer << static_cast<int>(key.phase) << key.call << ':' << exchange->devices
          << exchange->arrived << exchange->sent.has_value();
      for (const auto& [place, part] : exchange->parts) *to << place.rank << '.' << place.device.id;
    }
    for (const auto& [key, next] : next_calls_) *to << '>' << key.layer << next;
    for (const auto& layer : layers) {
      *to << '|' << layer.devices.size() << layer.former.size() << layer.generation;
    }
  }
};

struct State {
  size_t next = 0;  // the number of the next call
  bool waits = false, over = false;
  syncbn::Waiting waiting{};
  std::array<Ticket, 2> tickets{};
  std::vector<Numbers> results{};
  std::string error{};
};

struct Action {
  enum Kind { kArrive, kReceive, kLeave, kFault, kRecover } kind;
  int a = 0, b = 0;  // an actor or rank; for kReceive also the sender, for kFault the window's
  bool in_window = false;  // true for a late device's action
  Kind window = kArrive;
  int c = 0;
};

class Run {
 public:
  explicit Run(const Program& program)
      : program_(program),
        network_(std::make_shared<Network>(program.Ranks())),
        states_(program.actors.size()) {
    for (int rank = 0; rank < program.Ranks(); ++rank) {
      ranks_.push_back(std::make_unique<Rank>(network_, rank, program.arity));
    }
  }

  // Returns all actions that can come next.
  std::vector<Action> Next() const {
    std::vector<Action> actions;
    for (int actor = 0; actor < Actors(); ++actor) {
      if (MayArrive(actor)) actions.push_back({Action::kArrive, actor});
    }
    for (int to = 0; to < program_.Ranks(); ++to) {
      for (int from = 0; from < program_.Ranks(); ++from) {
        // A rank receives only while a device waits, or after its end.
        const bool receives = !IsStopped(to) && (Waits(to) || IsDone(to));
        if (receives && HasMessage(to, from)) actions.push_back({Action::kReceive, to, from});
      }
      // The messages of four ranks that leave can arrive in too many orders.
      if (program_.Ranks() < 4 && IsDone(to) && !ranks_[to]->HasLeft() && !IsStopped(to) &&
          !HasError(to)) {
        actions.push_back({Action::kLeave, to});
      }
    }
    if (program_.fault == Fault::kRecovers && fault_done_ && !recovered_ && IsDone(0)) {
      actions.push_back({Action::kRecover});
    }
    AddFaults(&actions);
    return actions;
  }

  void Do(const Action& action) {
    switch (action.kind) {
      case Action::kArrive: Arrive(action.a); break;
      case Action::kReceive: ranks_[action.a]->Receive(action.b); break;
      case Action::kLeave: ranks_[action.a]->Leave(); break;
      case Action::kFault: DoFault(action); break;
      case Action::kRecover: Recover(); break;
    }
    Settle();
  }

  std::string Describe() const {
    std::ostringstream text;
    text << fault_done_ << recovered_ << told_;
    for (const State& state : states_) {
      text << ';' << state.next << state.waits << state.over << state.error.size() << ':'
           << state.tickets[0].number << ',' << state.tickets[1].number;
    }
    for (const auto& rank : ranks_) rank->Describe(&text);
    for (const auto& queue : network_->queues) {
      for (int from = 0; from < program_.Ranks(); ++from) {
        text << '[';
        for (const auto& [sender, bytes] : queue) {
          if (sender == from) text.write(bytes.data(), bytes.size());
        }
      }
    }
    return text.str();
  }

  // Checks the end of the run. Returns the first broken promise, or an empty text. `known` has the
  // results of all runs of the program.
  std::string Check(std::map<std::pair<std::string, size_t>, Numbers>* known) {
    const bool well = program_.fault == Fault::kNone;
    const bool ends_by_time = program_.fault == Fault::kStops || program_.fault == Fault::kIsLate ||
                              (program_.fault == Fault::kFails && !told_);
    if (AnyWaits() && !ends_by_time) return "a device waits, and only time would end it";
    if (program_.fault == Fault::kFails && !told_ && IsForGood()) return "others got a local error";
    PassTime();
    if (AnyWaits()) return "a device still waits after the timeouts";
    for (int actor = 0; actor < Actors(); ++actor) {
      const State& state = states_[actor];
      const bool may_fail = !well && !recovered_;
      if (!may_fail && !state.error.empty()) return "an error without a fault: " + state.error;
      const std::string wrong = CheckResults(actor, known);
      if (!wrong.empty()) return wrong;
    }
    for (int rank = 0; rank < program_.Ranks(); ++rank) {
      if (IsStopped(rank)) continue;
      Rank& here = *ranks_[rank];
      if (IsForGood() && !here.HasLeft() && !here.failed_for_good_)
        return "a failure stays unknown";
      if (!here.exchanges_.empty()) return "an exchange is left over";
    }
    return CheckDepartures();
  }

 private:
  int Actors() const { return static_cast<int>(program_.actors.size()); }
  const Actor& Of(int actor) const { return program_.actors[actor]; }
  bool IsStopped(int rank) const {
    return program_.fault == Fault::kStops && fault_done_ && rank == program_.culprit;
  }
  template <typename Predicate>
  bool Any(int rank, const Predicate& predicate) const {
    for (int actor = 0; actor < Actors(); ++actor) {
      if (Of(actor).rank == rank && predicate(actor)) return true;
    }
    return false;
  }
  bool Waits(int rank) const {
    return Any(rank, [&](int actor) { return states_[actor].waits; });
  }
  bool IsDone(int rank) const {
    return !Any(rank, [&](int actor) { return !states_[actor].over; });
  }
  bool HasError(int rank) const {
    return Any(rank, [&](int actor) { return !states_[actor].error.empty(); });
  }
  bool AnyWaits() const {
    for (int rank = 0; rank < program_.Ranks(); ++rank) {
      if (!IsStopped(rank) && Waits(rank)) return true;
    }
    return false;
  }
  bool IsForGood() const {
    bool any = false;
    for (int rank = 0; rank < program_.Ranks(); ++rank) {
      any = any || (!IsStopped(rank) && ranks_[rank]->failed_for_good_);
    }
    return any;
  }
  bool HasMessage(int to, int from) const {
    const auto& queue = network_->queues[to];
    return std::any_of(queue.begin(), queue.end(),
                       [&](const auto& entry) { return entry.first == from; });
  }
  bool MayArrive(int actor) const {
    const auto is_earlier = [&](int other) {
      return Of(other).stage < Of(actor).stage && !states_[other].over;
    };
    const State& state = states_[actor];
    return !state.waits && !state.over && !IsStopped(Of(actor).rank) &&
           !Any(Of(actor).rank, is_earlier);
  }

  void AddFaults(std::vector<Action>* actions) const {
    const int culprit = program_.culprit;
    const bool has_action = program_.fault != Fault::kNone && program_.fault != Fault::kDisagrees;
    if (fault_done_ || !has_action || ranks_[culprit]->HasLeft()) return;
    if (program_.fault != Fault::kIsLate) return actions->push_back({Action::kFault});
    const std::vector<Action> others = *actions;
    for (int actor = 0; actor < Actors(); ++actor) {
      if (Of(actor).rank != culprit || !states_[actor].waits) continue;
      actions->push_back({Action::kFault, actor});
      for (const Action& other : others) {
        const int rank = other.kind == Action::kArrive ? Of(other.a).rank : other.a;
        if (rank != culprit) continue;
        actions->push_back({Action::kFault, actor, other.b, true, other.kind, other.a});
      }
    }
  }

  void Arrive(int actor) {
    State& state = states_[actor];
    Rank& rank = *ranks_[Of(actor).rank];
    const Call& call = Of(actor).calls[state.next];
    const bool is_named = call.phase == Phase::kCall;
    Contribution own;
    own.phase = call.phase;
    own.members = is_named ? nullptr : &rank.layers[call.layer];
    if (!is_named) own.device = {"cpu", Of(actor).device};
    own.shape = {1};
    own.signature.operation = is_named ? Operation::kConcat : Operation::kSum;
    own.signature.channels = call.channels;
    own.numbers = NumbersOf(actor, state.next);
    const int devices = Of(actor).devices;
    own.devices = static_cast<size_t>(devices > 0 ? devices : program_.devices[Of(actor).rank]);
    own.signature.ranks = call.ranks;
    own.shared_name = is_named ? "named" : rank.layers[call.layer].layer;
    own.timeout_seconds = 1;
    try {
      state.waiting = rank.Arrive(std::move(own), &state.tickets[call.layer], now_);
      state.waits = true;
    } catch (const syncbn::Error& error) {
      state.error = error.what();
      state.over = true;
      told_ = told_ || (fault_done_ && !is_named && program_.Ranks() > 1);
    }
  }

  // The first number is rounded in sums, so their order matters. The others are exact.
  Numbers NumbersOf(int actor, size_t call) const {
    const double place = 10 * Of(actor).rank + Of(actor).device + 1;
    const double number = 1 / (3 * place + static_cast<double>(call));
    if (Of(actor).calls[call].phase == Phase::kCall) return Numbers(Of(actor).rank + 1, place);
    return {number, place};
  }

  void DoFault(const Action& action) {
    const int culprit = program_.culprit;
    Rank& rank = *ranks_[culprit];
    fault_done_ = true;
    told_ = program_.Ranks() > 1 && rank.AwaitsRanks();
    if (program_.fault == Fault::kTells) rank.Fail("the ship sinks", true);
    if (program_.fault == Fault::kFails || program_.fault == Fault::kRecovers) {
      rank.Fail("the ship sinks", false);
    }
    if (program_.fault == Fault::kLeaves) {
      rank.Leave();
      for (int actor = 0; actor < Actors(); ++actor) {
        if (Of(actor).rank == culprit && !states_[actor].waits) states_[actor].over = true;
      }
    }
    if (program_.fault == Fault::kIsLate) {
      static std::function<void()> in_window;
      if (action.in_window) in_window = [&] { Do({action.window, action.c, action.b}); };
      if (action.in_window) syncbn::SetLocator([] { in_window(); });
      rank.IsOver(states_[action.a].waiting, now_ + std::chrono::seconds(20));
      syncbn::SetLocator(nullptr);
    }
  }

  void Recover() {
    recovered_ = true;
    ranks_[0]->Reset();
    for (State& state : states_) state = State();
  }

  // Continues the devices whose exchange is over.
  void Settle() {
    for (int actor = 0; actor < Actors(); ++actor) {
      State& state = states_[actor];
      if (!state.waits || !state.waiting.exchange->over) continue;
      state.waits = false;
      state.error = state.waiting.exchange->error;
      if (state.error.empty()) state.results.push_back(state.waiting.exchange->result);
      if (state.error.empty()) ++state.next;
      state.over = !state.error.empty() || state.next == Of(actor).calls.size();
    }
  }

  void PassTime() {
    for (int step = 0; step < 80 && AnyWaits(); ++step) {
      now_ += std::chrono::milliseconds(100);
      for (int actor = 0; actor < Actors(); ++actor) {
        const int rank = Of(actor).rank;
        if (states_[actor].waits && !IsStopped(rank)) {
          ranks_[rank]->IsOver(states_[actor].waiting, now_);
        }
      }
      ReceiveAll();
    }
  }

  void ReceiveAll() {
    for (int to = 0; to < program_.Ranks(); ++to) {
      for (int from = 0; from < program_.Ranks(); ++from) {
        while (!IsStopped(to) && HasMessage(to, from)) ranks_[to]->Receive(from);
      }
    }
    Settle();
  }

  std::string CheckResults(int actor, std::map<std::pair<std::string, size_t>, Numbers>* known) {
    const std::vector<Call>& calls = Of(actor).calls;
    for (size_t k = 0; k < states_[actor].results.size(); ++k) {
      const Numbers& result = states_[actor].results[k];
      const std::string name = std::to_string(calls[k].layer) + "/" +
                               std::to_string(static_cast<int>(calls[k].phase)) + "/" +
                               std::to_string(Of(actor).stage);
      const auto [entry, is_new] = known->emplace(std::pair(name, k), result);
      if (entry->second != result) return "devices or runs have different bits";
      if (!is_new) continue;
      Numbers expected;
      double sum = 0;
      for (int other = 0; other < Actors(); ++other) {
        const std::vector<int>& group = calls[k].ranks;
        const bool is_in = group.empty() || std::count(group.begin(), group.end(), Of(other).rank);
        if (!is_in || Of(other).stage != Of(actor).stage || Of(other).calls.size() <= k ||
            Of(other).calls[k].layer != calls[k].layer) {
          continue;
        }
        const Numbers own = NumbersOf(other, k);
        expected.insert(expected.end(), own.begin(), own.end());
        sum += own.back();
      }
      const bool is_right =
          calls[k].phase == Phase::kCall ? result == expected : result.back() == sum;
      if (!is_right) return "a result is wrong";
    }
    return "";
  }

  // Makes all ranks leave and close, in simulated time.
  std::string CheckDepartures() {
    std::vector<syncbn::Departure> departures;
    for (int rank = 0; rank < program_.Ranks(); ++rank) {
      if (!IsStopped(rank)) ranks_[rank]->Leave();
      departures.push_back({std::chrono::hours(1), std::chrono::seconds(5), now_, now_});
    }
    ReceiveAll();
    const bool all_leave = program_.fault != Fault::kStops;
    for (const int seconds : {0, 4, 6}) {
      for (int rank = 0; rank < program_.Ranks() && program_.Ranks() > 1; ++rank) {
        if (IsStopped(rank)) continue;
        const Time now = now_ + std::chrono::seconds(seconds);
        const bool may = ranks_[rank]->MayClose(&departures[rank], now);
        const bool is_bad = ranks_[rank]->failed_for_good_;
        const bool must = all_leave || !fault_done_ || (is_bad && seconds == 6);
        if (may != must) return "a rank that leaves closes too early or too late";
      }
    }
    return "";
  }

  const Program& program_;
  const std::shared_ptr<Network> network_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<State> states_;
  Time now_{std::chrono::hours(1)};
  bool fault_done_ = false, recovered_ = false;
  bool told_ = false;  // the rank with the fault awaited other ranks, or a device arrived later
};

}  // namespace schedule
