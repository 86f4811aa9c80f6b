// Tests communicators without MPI; a process is a thread here: calls beside a wait. The protocol is
// in test_many_ranks.cc and test_soak.cc, in simulated time.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collective/processes/communicator.h"
#include "local_transport.h"
#include "simulation.h"

namespace {

using syncbn::Bytes;
using syncbn::Communicator;

// `function(communicator)` on each rank, one thread each.
void Run(int size, const std::function<void(Communicator*)>& function) {
  const auto network = std::make_shared<Network>(size);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    auto transport = std::make_unique<LocalTransport>(network, rank);
    ranks.push_back(std::make_unique<Communicator>(std::move(transport)));
  }
  Parallel(size, [&](int rank) { function(ranks[rank].get()); });
}

// A process fails, recovers and leaves without waiting for an exchange that waits.
TEST(CallsGetThroughAWait) {
  for (const bool leaves : {false, true}) {
    Run(2, [&](Communicator* rank) {
      std::thread waiting([=] {
        syncbn::Contribution own = simulation::Of(std::to_string(rank->rank()), Bytes(8));
        own.timeout_seconds = 60;
        const std::string text = ErrorOf([&] { rank->AllReduce(std::move(own)); });
        CheckHas(text, leaves ? "layer '" : "the ship sinks");
      });
      Sleep(50);
      leaves ? rank->Leave() : rank->Fail("the ship sinks");
      waiting.join();
      if (leaves) {
        CHECK(rank->AwaitLeave(10));
      } else {
        rank->Reset();
        CHECK_EQ(rank->Failure(), "");
      }
    });
  }
}

}  // namespace

int main() { return check::RunTests(); }
