// Tests communicators without MPI; a process is a thread here: calls beside a wait, and groups of
// devices. test_many_ranks.cc and test_soak.cc have the protocol, in simulated time.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collective/devices/group.h"
#include "collective/processes/communicator.h"
#include "local_transport.h"
#include "simulation.h"

namespace {

using syncbn::Bytes;
using syncbn::Communicator;
using syncbn::ToBytes;

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

// A forward call of device `id`, one of `devices` of its rank, with all ranks.
syncbn::AllReduceOptions Forward(Communicator* rank, syncbn::Group* group, int id, int devices,
                                 double number) {
  syncbn::AllReduceOptions options;
  options.device = {"cpu", id};
  options.size = static_cast<size_t>(devices);
  options.ticket = group->BeginForward(options.device, options.size);
  options.phase = "forward";
  options.arrival = {"same", "", ToBytes<double>({number})};
  options.processes = rank;
  options.shared_name = "norm";
  options.contribution.signature = "same";
  options.contribution.timeout_seconds = 60;
  return options;
}

// A layer on another number of devices on each rank: their payloads have unlike sizes.
TEST(GroupMakesOneExchange) {
  Run(3, [](Communicator* rank) {
    const int devices = rank->rank() + 1;
    syncbn::Group group("norm");
    Parallel(devices, [&](int id) {
      for (int step = 0; step < 50; ++step) {
        const double at = 100 * step;
        auto options = Forward(rank, &group, id, devices, at + 10 * rank->rank() + id);
        options.contribution.operation = syncbn::ReduceOperation::kConcat;
        for (const char* phase : {"forward", "backward"}) {
          options.phase = phase;
          const auto reduced = group.AllReduce(options);
          options.ticket.key = reduced->key;
          CHECK(reduced->payload ==
                ToBytes<double>({at, at + 10, at + 11, at + 20, at + 21, at + 22}));
        }
      }
    });
  });
}

}  // namespace

int main() { return check::RunTests(); }
