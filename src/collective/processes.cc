// Where the process keeps its communicator.
#include "collective/processes.h"

#include <atomic>

namespace syncbn {
namespace {

std::atomic<Communicator*> communicator{nullptr};

}  // namespace

Communicator* TheCommunicator() { return communicator; }

ProcessGroup* TheProcessGroup() { return communicator; }

void OpenCommunicator(std::unique_ptr<Wire> wire) {
  communicator = new Communicator(std::move(wire));
}

}  // namespace syncbn
