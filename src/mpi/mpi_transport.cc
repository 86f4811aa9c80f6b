// The only file that knows MPI: messages over a communicator of mpi4py's. native/mpi.py loads it as
// a separate library, so that nothing else needs MPI. Plain functions of MPI 3, so every
// implementation will do.
#include <mpi.h>

#include <climits>
#include <functional>
#include <iterator>
#include <list>
#include <string>
#include <utility>
#include <vector>

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

int CallClosing(MPI_Comm, int, void* closing, void*) {
  (*static_cast<std::function<void()>*>(closing))();
  return MPI_SUCCESS;
}

class MpiTransport : public Transport {
 public:
  explicit MpiTransport(MPI_Comm comm) : comm_(comm) {
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
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

}  // namespace
}  // namespace syncbn

// Whether the MPI that was linked at run time is the one that mpi4py has initialized.
SYNCBN_EXPORT int gluon_syncbn_mpi_initialized() {
  int is = 0;
  MPI_Initialized(&is);
  return is;
}

// A syncbn::Transport, which the caller owns, over this communicator, in which nobody else sends
// from rank to rank. Handles of Fortran are integers in every MPI.
SYNCBN_EXPORT void* gluon_syncbn_mpi_transport(int comm) {
  return static_cast<syncbn::Transport*>(new syncbn::MpiTransport(MPI_Comm_f2c(comm)));
}
