// Trains on simulated ranks while connections break, ranks pause and fail, and batches are uneven:
// every rank receives the right sum of every step, nothing is left over in the end, and no wait
// takes longer than two timeouts. GLUON_SYNCBN_NATIVE=full makes 100,000 exchanges.
#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "simulation.h"

namespace {

using namespace simulation;

struct Place {
  int epoch, step;
};

bool operator<(const Place& a, const Place& b) {
  return std::tie(a.epoch, a.step) < std::tie(b.epoch, b.step);
}

struct Training {
  int epochs, steps;  // of one epoch, at most

  // Shards differ in size. Rank 0 has all steps of even epochs, rank 1 all steps of odd ones.
  int StepsOf(int epoch, int rank) const {
    return rank % 2 == epoch % 2 ? steps : std::max(1, steps - (3 * rank + epoch) % 4);
  }
  int64_t Contributes(Place place, int rank) const {
    if (place.step >= StepsOf(place.epoch, rank)) return 0;
    return 1000000ll * place.epoch + 1000ll * place.step + rank + 1;
  }
  int64_t Sum(Place place, int size) const {
    int64_t sum = 0;
    for (int rank = 0; rank < size; ++rank) sum += Contributes(place, rank);
    return sum;
  }
};

// One rank: it takes steps, joins at the end of each epoch, and recovers after an error. Then all
// continue with the first step that one of them lacks.
class Trainee {
 public:
  Trainee(Simulation* sim, int rank, const Training& training)
      : sim_(sim), rank_(rank), training_(training), protocol_(sim->ranks[rank].protocol.get()) {}

  bool done() const { return state_ == State::kDone; }
  Place place() const { return place_; }
  int64_t failures() const { return failures_; }

  // Does all that it can without waiting.
  void Advance() {
    try {
      while (Advances()) continue;
    } catch (const syncbn::Error&) {
      pending_.reset();
      Think(State::kRecover, 20000);
    }
  }

 private:
  enum class State { kThink, kStep, kJoin, kEnd, kRecover, kResume, kDone };

  // Computes for a while and then does `next`.
  bool Think(State next, int most_microseconds) {
    state_ = State::kThink;
    sim_->After(microseconds(sim_->random() % most_microseconds), [this, next] {
      state_ = next;
      sim_->Resume(rank_);
    });
    return false;
  }

  // Begins the next exchange of this name if none is pending; tells that it is over, and throws its
  // error.
  bool Over(const std::string& name, Bytes payload, ReduceOperation operation) {
    if (!pending_) {
      const std::string key = protocol_->NextKey(name);
      pending_ = protocol_->Begin(Of(key, std::move(payload), operation), sim_->now());
    }
    if (!pending_->over()) return false;
    const Time begun = std::max(pending_->begun, sim_->ranks[rank_].resumed);
    CHECK(sim_->now() - begun <= 2 * kTimeout + 2 * kTick, "rank ", rank_);
    const auto ended = std::exchange(pending_, nullptr);
    result_ = ended->Result();
    return true;
  }

  bool Advances() {
    switch (state_) {
      case State::kThink:
      case State::kDone:
        return false;
      case State::kStep:
        return Step();
      case State::kJoin:
        if (protocol_->joining().active()) return false;
        // The lowest of those that had the most steps left, also from the middle of an epoch.
        CHECK_EQ(protocol_->joining().Result(), place_.epoch % 2);
        StartFrom({place_.epoch + 1, 0});
        return true;
      case State::kEnd:
        if (!Over("end", {}, ReduceOperation::kConcat)) return false;
        state_ = State::kDone;
        return false;
      case State::kRecover:
        ++failures_;
        protocol_->Reset();
        state_ = State::kResume;
        return true;
      case State::kResume: {
        if (!Over("resume", ToBytes<Place>({place_}), ReduceOperation::kConcat)) return false;
        CHECK_EQ(result_.size(), sim_->size() * sizeof(Place));
        const auto places = FromBytes<Place>(result_);
        StartFrom(*std::min_element(places.begin(), places.end()));
        return true;
      }
    }
    return false;
  }

  bool Step() {
    if (place_.step >= training_.StepsOf(place_.epoch, rank_)) {
      state_ = State::kJoin;
      protocol_->Join(1e-3 * kTimeout.count(), sim_->now());
      return true;
    }
    const int64_t own = training_.Contributes(place_, rank_);
    if (!Over("step", ToBytes<int64_t>({own}), ReduceOperation::kSumInt64)) return false;
    CHECK_EQ(FromBytes<int64_t>(result_).at(0), training_.Sum(place_, sim_->size()));
    ++place_.step;
    return Think(State::kStep, sim_->random() % 50 == 0 ? 100000 : 100);
  }

  void StartFrom(Place place) {
    place_ = place;
    state_ = place_.epoch == training_.epochs ? State::kEnd : State::kStep;
  }

  Simulation* const sim_;
  const int rank_;
  const Training& training_;
  Protocol* const protocol_;
  State state_ = State::kStep;
  Place place_{0, 0};
  std::shared_ptr<syncbn::PendingExchange> pending_;
  Bytes result_;
  int64_t failures_ = 0;
};

// Lets one of four things go wrong, and another one after a while, as long as `lasts` says so.
void Disturb(Simulation* sim, int every_microseconds, const std::function<bool()>& lasts) {
  sim->After(microseconds(1 + sim->random() % (2 * every_microseconds)), [=] {
    sim->lost.clear();
    sim->refused.clear();
    if (!lasts()) return;
    const int a = static_cast<int>(sim->random() % sim->size());
    const int b = static_cast<int>(sim->random() % sim->size());
    const milliseconds duration(sim->random() % 2500);
    const uint32_t kind = sim->random() % 4;
    if (kind == 0) sim->Pause(a, duration);
    if (kind == 1) sim->ranks[a].protocol->Fail("an exception of the user");
    if (kind >= 2 && a != b) {
      auto* const connections = kind == 2 ? &sim->lost : &sim->refused;
      connections->insert(std::minmax(a, b));
      sim->After(duration, [=] { connections->clear(); });
    }
    Disturb(sim, every_microseconds, lasts);
  });
}

void Soak(int size, int epochs, int steps, int every_microseconds) {
  const Training training{epochs, steps};
  Simulation sim(size, 1000 * size);
  sim.delay = RandomDelay(&sim);
  std::vector<Trainee> trainees;
  for (int rank = 0; rank < size; ++rank) trainees.emplace_back(&sim, rank, training);
  for (int rank = 0; rank < size; ++rank) {
    sim.ranks[rank].task = [&trainees, rank] { trainees[rank].Advance(); };
    sim.After(milliseconds(sim.random() % 100), [&sim, rank] { sim.Resume(rank); });
  }
  // The last epoch is left in peace: nobody could tell a rank that has ended of what another lacks.
  if (every_microseconds > 0) {
    Disturb(&sim, every_microseconds, [&] {
      return std::all_of(trainees.begin(), trainees.end(), [&](const Trainee& trainee) {
        return trainee.place().epoch < epochs - 1;
      });
    });
  }
  const bool ended = sim.RunUntil([&] {
    return std::all_of(trainees.begin(), trainees.end(),
                       [](const Trainee& trainee) { return trainee.done(); });
  });
  CHECK(ended, size, " ranks");
  int64_t failures = 0;
  for (int rank = 0; rank < size; ++rank) {
    failures += trainees[rank].failures();
    CHECK(sim.ranks[rank].protocol->Idle(), "rank ", rank);
  }
  CHECK(every_microseconds == 0 || failures > 0, size, " ranks");
}

}  // namespace

int main() {
  for (int size : {64, 256}) Soak(size, 2, 5, 0);
  if (check::Times(1, 0)) Soak(1024, 2, 5, 0);
  for (int size : {2, 3, 4, 5, 7}) Soak(size, check::Times(190, 10), 100, 300000);
  for (int size : {8, 16, 33}) Soak(size, check::Times(16, 4), 100, 500000);
  Soak(64, check::Times(4, 2), 50, 500000);
  return check::Result();
}
