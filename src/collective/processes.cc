// Keeps the communicator of the process.
#include "collective/processes.h"

#include <atomic>

namespace syncbn {
namespace {

std::atomic<Communicator*> communicator{nullptr};

}  // namespace

Communicator* TheCommunicator() { return communicator; }

ProcessGroup* TheProcessGroup() { return communicator; }

void OpenCommunicator(std::unique_ptr<Transport> transport) {
  communicator = new Communicator(std::move(transport));
}

}  // namespace syncbn
