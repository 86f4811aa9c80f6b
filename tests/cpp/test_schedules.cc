// Tests exchange/table.h in every order of its calls. One mutex guards a Table, so a run is a
// sequence of actions (schedule.h): all sequences of small programs, skipping states that were seen
// before, and a random one of each larger program.
#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "check.h"
#include "schedule.h"

namespace {

using schedule::Action;
using schedule::Call;
using schedule::Fault;
using schedule::Program;
using schedule::Run;
using syncbn::Device;
using syncbn::Numbers;
using syncbn::Phase;

// ---- all runs ----------------------------------------------------------------------------------

int64_t all_states = 0;

void Explore(const Program& program) {
  if (check::failures > 0) return;  // the first broken promise suffices
  struct Choice {
    size_t taken, of;
  };
  std::unordered_set<size_t> seen;
  std::vector<Choice> choices;
  std::map<std::pair<std::string, size_t>, Numbers> known;
  int64_t runs = 0;
  const int64_t most = check::Rounds(1'000'000, 1'000'000) / 10;
  do {
    Run run(program);
    std::ostringstream trace;
    bool is_new = true;
    for (size_t depth = 0; is_new; ++depth) {
      const std::vector<Action> actions = run.Next();
      if (actions.empty()) break;
      if (depth == choices.size()) {
        is_new = seen.insert(std::hash<std::string>()(run.Describe())).second;
        if (!is_new) break;
        choices.push_back({0, actions.size()});
      }
      const Action& action = actions[choices[depth].taken];
      trace << ' ' << action.kind << ',' << action.a << ',' << action.b;
      run.Do(action);
    }
    const std::string wrong = is_new ? run.Check(&known) : "";
    CHECK(wrong.empty(), program.name, " fault ", static_cast<int>(program.fault), " of rank ",
          program.culprit, ": ", wrong, " after", trace.str());
    if (!wrong.empty()) return;
    while (!choices.empty() && choices.back().taken + 1 == choices.back().of) choices.pop_back();
    if (!choices.empty()) ++choices.back().taken;
  } while (!choices.empty() && ++runs < most);
  CHECK(choices.empty() || most < 100'000, program.name, " has too many runs");
  all_states += static_cast<int64_t>(seen.size());
}

const Call kF{Phase::kForward}, kB{Phase::kBackward};
const Call kG{Phase::kForward, 1}, kH{Phase::kBackward, 1};  // another layer
const Call kN{Phase::kCall};

std::vector<Program> Programs() {
  const Call kGs{Phase::kForward, 1, {1, 2}}, kHs{Phase::kBackward, 1, {1, 2}};
  const Device cpu0{"cpu", 0};
  return {
      {"2 ranks", {1, 1}, {{0, 0, {kF, kB}}, {1, 0, {kF, kB}}}},
      {"2 and 1 devices", {2, 1}, {{0, 0, {kF, kB}}, {0, 1, {kF, kB}}, {1, 0, {kF, kB}}}},
      {"3 ranks", {1, 1, 1}, {{0, 0, {kF, kB}}, {1, 0, {kF, kB}}, {2, 0, {kF, kB}}}},
      {"two branches",
       {1, 1},
       {{0, 0, {kF, kB}}, {0, 0, {kG, kH}}, {1, 0, {kF, kB}}, {1, 0, {kG, kH}}}},
      {"two steps of 3 devices",
       {3},
       {{0, 0, {kF, kB, kF, kB}}, {0, 1, {kF, kB, kF, kB}}, {0, 2, {kF, kB, kF, kB}}}},
      {"a repeated backward",
       {2, 1},
       {{0, 0, {kF, kB, kB}}, {0, 1, {kF, kB, kB}}, {1, 0, {kF, kB, kB}}}},
      {"a group",
       {1, 1, 1},
       {{0, 0, {kF, kB}},
        {1, 0, {kF, kB}},
        {1, 0, {kGs, kHs}},
        {2, 0, {kF, kB}},
        {2, 0, {kGs, kHs}}}},
      {"a middle level",
       {1, 1, 1, 1},
       {{0, 0, {kF, kB}}, {1, 0, {kF, kB}}, {2, 0, {kF, kB}}, {3, 0, {kF, kB}}},
       2},
      {"a named list", {1, 1, 1, 1}, {{0, 0, {kN}}, {1, 0, {kN}}, {2, 0, {kN}}, {3, 0, {kN}}}, 2},
      {"participants",
       {2, 1},
       {{0, 0, {kF, kB}}, {1, 0, {kF, kB}}, {0, 0, {kF}, 1}, {0, 1, {kF}, 1}, {1, 0, {kF}, 1}},
       32,
       {{cpu0}, {}}},
      {"a net that moves",
       {2, 1},
       {{0, 0, {kF, kB}},
        {0, 1, {kF, kB}},
        {1, 0, {kF, kB}},
        {0, 2, {kF}, 1},
        {0, 3, {kF}, 1},
        {1, 0, {kF}, 1}},
       32,
       {{}, {}}},
  };
}

TEST(AllSchedules) {
  for (Program program : Programs()) {
    Explore(program);
    for (const Fault fault :
         {Fault::kTells, Fault::kFails, Fault::kStops, Fault::kLeaves, Fault::kIsLate}) {
      program.fault = fault;
      for (program.culprit = 0; program.culprit < program.Ranks(); ++program.culprit) {
        if (program.Ranks() > 1 || fault != Fault::kLeaves) Explore(program);
      }
    }
  }
}

TEST(RecoveriesInOneProcess) {
  for (int devices = 2; devices <= 3; ++devices) {
    Program program{"two layers that recover", {devices}, {}};
    program.fault = Fault::kRecovers;
    for (int id = 0; id < devices; ++id) {
      program.actors.push_back({0, id, {kF, kB}});
      program.actors.push_back({0, id, {kG, kH}});
    }
    Explore(program);
  }
}

TEST(RanksThatDisagree) {
  Call other = kB;
  other.channels = 2;
  Program program{
      "a rank disagrees", {1, 1, 1}, {{0, 0, {kF, kB}}, {1, 0, {kF, kB}}, {2, 0, {kF, other}}}};
  program.fault = Fault::kDisagrees;
  Explore(program);
}

// ---- random runs -------------------------------------------------------------------------------

// All devices call a layer twice in each step, and the devices of a group of ranks also call
// another layer. Backward comes in any order.
Program RandomProgram(int seed, std::mt19937* random) {
  const auto below = [&](int size) { return static_cast<int>((*random)() % size); };
  Program program{syncbn::Concat("random program ", seed), {}, {}};
  program.fault = static_cast<Fault>(seed % (static_cast<int>(Fault::kDisagrees) + 1));
  if (program.fault == Fault::kRecovers) program.fault = Fault::kNone;  // only in one process
  const int ranks = (program.fault == Fault::kNone ? 1 : 2) + below(13);
  program.arity = 2 + below(3);
  program.culprit = below(ranks);
  program.participants.resize(4);
  std::vector<int> group;
  for (int rank = 0; rank < ranks; ++rank) {
    program.devices.push_back(1 + below(3));
    if (below(3) > 0) group.push_back(rank);
  }
  // A device would wait in vain for another device of its rank, which has left.
  if (group.size() == 1 && program.fault == Fault::kLeaves) group.clear();
  for (int rank = 0; rank < ranks; ++rank) {
    const bool is_in_group = std::binary_search(group.begin(), group.end(), rank);
    const bool disagrees = program.fault == Fault::kDisagrees && rank == program.culprit;
    for (int device = 0; device < program.devices[rank]; ++device) {
      for (int stage = 0; stage < 4; ++stage) {
        const Phase phase = stage % 2 == 0 ? Phase::kForward : Phase::kBackward;
        const int channels = disagrees && stage == 3 ? 2 : 1;
        for (const int ticket : {0, 1}) {
          program.actors.push_back({rank, device, {{phase, 0, {}, channels, ticket}}, stage});
        }
        if (is_in_group) program.actors.push_back({rank, device, {{phase, 1, group}}, stage});
      }
    }
  }
  return program;
}

TEST(RandomSchedules) {
  const int programs = check::Rounds(3000, 300);
  for (int seed = 0; seed < programs && check::failures == 0; ++seed) {
    std::mt19937 random(seed);
    const Program program = RandomProgram(seed, &random);
    Run run(program);
    for (auto next = run.Next(); !next.empty(); next = run.Next()) {
      run.Do(next[random() % next.size()]);
    }
    std::map<std::pair<std::string, size_t>, Numbers> known;
    const std::string wrong = run.Check(&known);
    CHECK(wrong.empty(), program.name, " fault ", static_cast<int>(program.fault), " of rank ",
          program.culprit, " of ", program.Ranks(), ": ", wrong);
  }
}

}  // namespace

int main() {
  const int result = check::RunTests();
  std::cout << all_states << " states" << std::endl;
  return result;
}
