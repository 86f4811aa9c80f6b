// Notes who has left, and asks the others again and again.
#include "collective/leaving.h"

namespace syncbn {
namespace {

// At the end nothing is lost by patience: who ends MPI too early ends the others with it.
constexpr std::chrono::seconds kAnswerTime{10};

}  // namespace

void Leaving::Begin(bool in_peace) {
  begun_ = true;
  in_peace_ = in_peace;
}

void Leaving::Tick(Time now) {
  if (!awaits_ || (question_ && now < question_->sent + kAnswerTime)) return;
  const std::vector<int> others = ranks_.OthersBut(left_);
  for (int rank : others) {
    if (question_ && !question_->answers.count(rank)) silent_ = true;
  }
  question_ = queries_->Ask(others, "", now);
}

}  // namespace syncbn
