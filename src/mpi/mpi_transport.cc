// The only file that knows MPI: messages over a duplicate of MPI_COMM_WORLD.
// Who uses it: gluon_syncbn/native/mpi.py loads it as a separate library, so that nothing
// else needs MPI. Plain functions of MPI 3, so every implementation will do.
#include <mpi.h>

#include <chrono>
#include <climits>
#include <functional>
#include <iterator>
#include <list>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "collective/common/timeout.h"
#include "collective/processes/transport.h"
#include "core/c_interface.h"
#include "core/error.h"

namespace syncbn {
namespace {

constexpr int kTag = 1;

void Check(int code, const char* function) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(Concat(function, " failed: ", std::string(text, length)));
}

// The step that all ranks take together before the first message. MPI writes into this until they
// have, even after a call has timed out: so it is never deleted, and the next call goes on with it.
struct Connection {
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  char name[MPI_MAX_PROCESSOR_NAME] = {};
  std::vector<char> names;  // of all ranks, once they are asked for
};

Connection* Begin() {
  Connection* const connection = new Connection;
  int length = 0;
  Check(MPI_Get_processor_name(connection->name, &length), "MPI_Get_processor_name");
  Check(MPI_Comm_idup(MPI_COMM_WORLD, &connection->comm, &connection->request), "MPI_Comm_idup");
  return connection;
}

void AskForNames(Connection* connection) {
  int size = 0;
  MPI_Comm_set_errhandler(connection->comm, MPI_ERRORS_RETURN);
  MPI_Comm_size(connection->comm, &size);
  connection->names.resize(size * sizeof(connection->name));
  Check(MPI_Iallgather(connection->name, sizeof(connection->name), MPI_CHAR,
                       connection->names.data(), sizeof(connection->name), MPI_CHAR,
                       connection->comm, &connection->request), "MPI_Iallgather");
}

// A blocking call would occupy a processor forever if a rank is missing.
bool Completes(MPI_Request* request, Time deadline) {
  for (int done = 0;;) {
    Check(MPI_Test(request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (done) return true;
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

// All ranks have to call this.
const Connection& Connect(double timeout_seconds) {
  const Time deadline = Clock::now() + ToDuration(timeout_seconds);
  static Connection* const connection = Begin();
  bool complete = Completes(&connection->request, deadline);
  if (complete && connection->names.empty()) {
    AskForNames(connection);
    complete = Completes(&connection->request, deadline);
  }
  if (complete) return *connection;
  throw Error(Concat("not every process that the launcher started called "
                     "gluon_syncbn.distributed.init() within ", timeout_seconds, " s"));
}

int CallClosing(MPI_Comm, int, void* closing, void*) {
  (*static_cast<std::function<void()>*>(closing))();
  return MPI_SUCCESS;
}

class MpiTransport : public Transport {
 public:
  explicit MpiTransport(MPI_Comm comm) : comm_(comm) {
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void Send(int to, Bytes message) override {
    if (message.size() > INT_MAX) {
      throw Error(Concat("a message of ", message.size(), " bytes exceeds MPI's ", INT_MAX));
    }
    sends_.emplace_back();
    Transfer& transfer = sends_.back();
    transfer.message = std::move(message);
    Check(MPI_Isend(transfer.message.data(), static_cast<int>(transfer.message.size()), MPI_BYTE,
                    to, kTag, comm_, &transfer.request), "MPI_Isend");
  }

  bool Receive(int* from, Bytes* message) override {
    for (auto send = sends_.begin(); send != sends_.end();) {
      send = Done(&*send) ? sends_.erase(send) : std::next(send);
    }
    while (StartReceive()) continue;
    // A complete message may have overtaken an earlier one of the same sender.
    std::vector<bool> waits_for(receives_.empty() ? 0 : size_);
    for (auto receive = receives_.begin(); receive != receives_.end(); ++receive) {
      if (waits_for[receive->peer]) continue;
      if (Done(&*receive)) {
        *from = receive->peer;
        *message = std::move(receive->message);
        receives_.erase(receive);
        return true;
      }
      waits_for[receive->peer] = true;
    }
    return false;
  }

  bool Busy() const override { return !sends_.empty() || !receives_.empty(); }

  // MPI_Finalize first deletes what is attached to MPI_COMM_SELF (MPI 3.1, 8.7.1).
  void OnClose(std::function<void()> closing) override {
    closing_ = std::move(closing);
    int keyval = 0;
    Check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, CallClosing, &keyval, nullptr),
          "MPI_Comm_create_keyval");
    Check(MPI_Comm_set_attr(MPI_COMM_SELF, keyval, &closing_), "MPI_Comm_set_attr");
  }

 private:
  struct Transfer {
    int peer = 0;
    MPI_Request request = MPI_REQUEST_NULL;
    Bytes message;
  };

  static bool Done(Transfer* transfer) {
    int done = 0;
    Check(MPI_Test(&transfer->request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    return done != 0;
  }

  bool StartReceive() {
    int found = 0, bytes = 0;
    MPI_Message matched;
    MPI_Status status;
    Check(MPI_Improbe(MPI_ANY_SOURCE, kTag, comm_, &found, &matched, &status), "MPI_Improbe");
    if (!found) return false;
    Check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    receives_.emplace_back();
    Transfer& transfer = receives_.back();
    transfer.peer = status.MPI_SOURCE;
    transfer.message.resize(bytes);
    Check(MPI_Imrecv(transfer.message.data(), bytes, MPI_BYTE, &matched, &transfer.request),
          "MPI_Imrecv");
    return true;
  }

  const MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
  std::list<Transfer> sends_, receives_;  // MPI holds their addresses
  std::function<void()> closing_;
};

bool owned = false;  // MPI was initialized here

void Initialize() {
  int is = 0, level = 0;
  MPI_Finalized(&is);
  if (is) throw Error("MPI was finalized already in this process");
  MPI_Initialized(&is);
  if (is) {
    MPI_Query_thread(&level);
    if (level != MPI_THREAD_MULTIPLE) {
      throw Error("MPI was initialized without MPI_THREAD_MULTIPLE, which is needed here: "
                  "initialize it with that thread level, or call "
                  "gluon_syncbn.distributed.init() first");
    }
    return;
  }
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  owned = true;
  if (level != MPI_THREAD_MULTIPLE) {
    throw Error("this MPI library does not provide MPI_THREAD_MULTIPLE, which is needed here");
  }
}

}  // namespace
}  // namespace syncbn

SYNCBN_EXPORT const char* gluon_syncbn_mpi_text() { return syncbn::LastError().c_str(); }

SYNCBN_EXPORT int gluon_syncbn_mpi_initialized() {
  int is = 0;
  MPI_Initialized(&is);
  return is;
}

// The implementation that was linked at run time.
SYNCBN_EXPORT const char* gluon_syncbn_mpi_version() {
  static char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(version, &length);
  return version;
}

// Initializes MPI unless it is initialized; returns the number of processes, or -1 with the text.
SYNCBN_EXPORT int gluon_syncbn_mpi_initialize() {
  return syncbn::CatchAll(-1, [] {
    syncbn::Initialize();
    int size = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    return size;
  });
}

// Makes the transport, a syncbn::Transport that the caller owns; null with the text. All ranks call
// it. machines[r] becomes the lowest rank on the machine of rank r; it has room for all ranks.
SYNCBN_EXPORT void* gluon_syncbn_mpi_transport(double timeout_seconds, int* machines) {
  return syncbn::CatchAll(static_cast<void*>(nullptr), [&] {
    const syncbn::Connection& connection = syncbn::Connect(timeout_seconds);
    const size_t length = sizeof(connection.name), size = connection.names.size() / length;
    std::unordered_map<std::string, int> lowest;  // ranks, by the names of their machines
    for (size_t rank = 0; rank < size; ++rank) {
      const std::string name(&connection.names[rank * length], length);
      machines[rank] = lowest.emplace(name, static_cast<int>(rank)).first->second;
    }
    return static_cast<syncbn::Transport*>(new syncbn::MpiTransport(connection.comm));
  });
}

// 1 if MPI was initialized here, and must be finalized here.
SYNCBN_EXPORT int gluon_syncbn_mpi_owned() { return syncbn::owned; }

// Finalizes MPI if it was initialized here and is not finalized yet. All ranks call it.
SYNCBN_EXPORT void gluon_syncbn_mpi_finalize() {
  int is = 0;
  MPI_Finalized(&is);
  if (syncbn::owned && !is) MPI_Finalize();
}
