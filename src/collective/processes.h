// The communicator of this process, made once.
// Who uses it: c_api.cc and mxnet/; op sees only TheProcessGroup of process_group.h.
#pragma once
#include <memory>

#include "collective/communicator.h"

namespace syncbn {

// Null until OpenCommunicator; never destroyed, because operators may outlive static destructors.
Communicator* TheCommunicator();
void OpenCommunicator(std::unique_ptr<Transport> transport);

}  // namespace syncbn
