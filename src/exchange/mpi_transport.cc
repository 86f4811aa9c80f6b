// Messages over a communicator of mpi4py. Only this file needs MPI, so native/processes.py loads it
// as a separate library. It calls plain functions of MPI 3, which every implementation has.
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "core/c_interface.h"
#include "core/error.h"
#include "exchange/transport.h"

namespace syncbn {
namespace {

void Check(int code, const char* function) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(Concat(function, " failed: ", std::string(text, length)));
}

// MPI_Finalize would wait without end for a rank that hangs.
int CallClosing(MPI_Comm, int, void* closing, void*) noexcept {
  bool all_end = false;
  syncbn::CatchAll([&] { all_end = (*static_cast<std::function<bool()>*>(closing))(); });
  if (!all_end) {
    std::fputs("gluon_syncbn ends all ranks, because one of them hangs after a failure\n", stderr);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  return MPI_SUCCESS;
}

// One receive is always posted for the next sender, because a message that finds a receive needs
// neither a second look nor a second buffer of MPI. So messages travel in chunks that fit it.
class MpiTransport : public Transport {
 public:
  explicit MpiTransport(MPI_Comm comm) : comm_(comm), chunk_(kChunkBytes) {
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
    partial_.resize(size_);
    PostReceive();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void Send(int to, Bytes message) override {
    sends_.push_back({std::move(message), {}});
    Sending& sending = sends_.back();
    const Bytes& bytes = sending.message;
    for (size_t at = 0; at < bytes.size(); at += kChunkBytes) {
      const size_t size = std::min(kChunkBytes, bytes.size() - at);
      const int tag = at + size < bytes.size() ? kMoreTag : kLastTag;
      sending.requests.push_back(MPI_REQUEST_NULL);
      Check(MPI_Isend(bytes.data() + at, static_cast<int>(size), MPI_BYTE, to, tag, comm_,
                      &sending.requests.back()),
            "MPI_Isend");
    }
    ForgetSent();
  }

  bool Receive(int* from, Bytes* message) override {
    if (!sends_.empty()) ForgetSent();
    if (receive_ == MPI_REQUEST_NULL) PostReceive();  // after an error
    int done = 0, bytes = 0;
    MPI_Status status;
    Check(MPI_Test(&receive_, &done, &status), "MPI_Test");
    if (!done) return false;
    Check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    Bytes& partial = partial_.at(static_cast<size_t>(status.MPI_SOURCE));
    if (partial.size() > kMostBytes) {
      throw Error(Concat("a message must have at most ", kMostBytes, " bytes"));
    }
    partial.insert(partial.end(), chunk_.begin(), chunk_.begin() + bytes);
    PostReceive();
    if (status.MPI_TAG == kMoreTag) return false;
    *from = status.MPI_SOURCE;
    message->clear();
    message->swap(partial);
    return true;
  }

  bool Busy() const override { return !sends_.empty(); }

  void Close() override {
    MPI_Cancel(&receive_);
    MPI_Wait(&receive_, MPI_STATUS_IGNORE);
  }

  // MPI_Finalize first deletes the attributes of MPI_COMM_SELF (MPI 3.1, 8.7.1).
  void OnClose(std::function<bool()> closing) override {
    closing_ = std::move(closing);
    int keyval = 0;
    Check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, CallClosing, &keyval, nullptr),
          "MPI_Comm_create_keyval");
    Check(MPI_Comm_set_attr(MPI_COMM_SELF, keyval, &closing_), "MPI_Comm_set_attr");
    MPI_Comm_free_keyval(&keyval);  // MPI frees it after the attribute
  }

 private:
  static constexpr size_t kChunkBytes = 1 << 15;
  static constexpr size_t kMostBytes = 1 << 28;
  static constexpr int kMoreTag = 1, kLastTag = 2;

  struct Sending {  // MPI reads it until the requests are done
    Bytes message;
    std::vector<MPI_Request> requests;
  };

  void ForgetSent() {
    sends_.remove_if([](Sending& sending) {
      int done = 0;
      Check(MPI_Testall(static_cast<int>(sending.requests.size()), sending.requests.data(), &done,
                        MPI_STATUSES_IGNORE),
            "MPI_Testall");
      return done != 0;
    });
  }

  void PostReceive() {
    Check(MPI_Irecv(chunk_.data(), static_cast<int>(chunk_.size()), MPI_BYTE, MPI_ANY_SOURCE,
                    MPI_ANY_TAG, comm_, &receive_),
          "MPI_Irecv");
  }

  const MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
  Bytes chunk_;
  MPI_Request receive_ = MPI_REQUEST_NULL;
  std::vector<Bytes> partial_;  // each rank's message as far as it has arrived
  std::list<Sending> sends_;
  std::function<bool()> closing_;
};

}  // namespace
}  // namespace syncbn

// The lines of core/c_interface.h, which the package compares with what it calls.
SYNCBN_EXPORT(const char*, gluon_syncbn_interface) { return syncbn::Interface().c_str(); }

// Return true if the MPI that was linked at run time is the MPI that mpi4py has initialized.
SYNCBN_EXPORT(int, gluon_syncbn_mpi_initialized) {
  int is = 0;
  MPI_Initialized(&is);
  return is;
}

// Return a syncbn::Transport over this communicator, which no one else may use. The caller owns it.
// Fortran's handles are integers in every MPI.
SYNCBN_EXPORT(void*, gluon_syncbn_mpi_transport, int comm) {
  return static_cast<syncbn::Transport*>(new syncbn::MpiTransport(MPI_Comm_f2c(comm)));
}
