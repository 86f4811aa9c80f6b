// Messages over a communicator of mpi4py. This file is a library of its own, because nothing else
// needs MPI. It calls only functions of the MPI 3 standard.
#include <mpi.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <utility>

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

// Waits until the launcher has read stderr. MPICH's launcher drops unread output at MPI_Abort.
void AwaitReader() {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  for (int unread = 0; ioctl(STDERR_FILENO, FIONREAD, &unread) == 0 && unread > 0;) {
    if (std::chrono::steady_clock::now() > deadline) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Ends all ranks if a rank hangs. MPI_Finalize calls this function before it waits for all ranks.
int CallClosing(MPI_Comm, int, void* closing, void*) noexcept {
  bool all_end = false;
  CatchAll([&] { all_end = (*static_cast<std::function<bool()>*>(closing))(); });
  if (!all_end) {
    std::fputs("gluon_syncbn ends all ranks, because one of them hangs after a failure\n", stderr);
    AwaitReader();
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  return MPI_SUCCESS;
}

// A receive is posted before its message arrives, because MPI then needs no buffer of its own. So
// messages have a largest size.
class MpiTransport : public Transport {
 public:
  explicit MpiTransport(MPI_Comm comm) : comm_(comm), buffer_(new char[kMostBytes]) {
    MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm_, &rank_);
    MPI_Comm_size(comm_, &size_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void Send(int to, Bytes message) override {
    if (message.size() > kMostBytes) {
      throw Error(
          Concat("a message must have at most ", kMostBytes, " bytes, got ", message.size()));
    }
    sends_.push_back({std::move(message), MPI_REQUEST_NULL});
    const Bytes& bytes = sends_.back().message;
    Check(MPI_Isend(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, to, 0, comm_,
                    &sends_.back().request),
          "MPI_Isend");
    ForgetSent();
  }

  bool Receive(int* from, Bytes* message) override {
    ForgetSent();
    if (receive_ == MPI_REQUEST_NULL) PostReceive();  // the first receive, or after an error
    int done = 0, bytes = 0;
    MPI_Status status;
    Check(MPI_Test(&receive_, &done, &status), "MPI_Test");
    if (!done) return false;
    Check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    *from = status.MPI_SOURCE;
    message->assign(buffer_.get(), buffer_.get() + bytes);
    PostReceive();
    return true;
  }

  bool Busy() const override { return !sends_.empty(); }

  void Close() override {
    MPI_Cancel(&receive_);
    MPI_Wait(&receive_, MPI_STATUS_IGNORE);
  }

  // MPI_Finalize first deletes the attributes of MPI_COMM_SELF (MPI 3.1, 8.7.1).
  void OnFinalize(std::function<bool()> closing) override {
    closing_ = std::move(closing);
    int keyval = 0;
    Check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, CallClosing, &keyval, nullptr),
          "MPI_Comm_create_keyval");
    Check(MPI_Comm_set_attr(MPI_COMM_SELF, keyval, &closing_), "MPI_Comm_set_attr");
    MPI_Comm_free_keyval(&keyval);  // MPI frees it after the attribute
  }

 private:
  static constexpr size_t kMostBytes = 1 << 24;  // the moments of a million channels

  struct Sending {
    Bytes message;  // MPI reads it until the request is done
    MPI_Request request;
  };

  void ForgetSent() {
    sends_.remove_if([](Sending& sending) {
      int done = 0;
      Check(MPI_Test(&sending.request, &done, MPI_STATUS_IGNORE), "MPI_Test");
      return done != 0;
    });
  }

  void PostReceive() {
    Check(MPI_Irecv(buffer_.get(), kMostBytes, MPI_BYTE, MPI_ANY_SOURCE, MPI_ANY_TAG, comm_,
                    &receive_),
          "MPI_Irecv");
  }

  const MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
  const std::unique_ptr<char[]> buffer_;  // its unused pages take no memory
  MPI_Request receive_ = MPI_REQUEST_NULL;
  std::list<Sending> sends_;
  std::function<bool()> closing_;
};

}  // namespace
}  // namespace syncbn

// As in c_api/python_api.cc.
SYNCBN_EXPORT(const char*, gluon_syncbn_build_id) { return SYNCBN_BUILD_ID; }

// Returns true if the loaded MPI is the MPI that mpi4py has initialized.
SYNCBN_EXPORT(int, gluon_syncbn_mpi_initialized) {
  int is = 0;
  MPI_Initialized(&is);
  return is;
}

// Returns a new syncbn::Transport over a communicator that nothing else uses. The argument is a
// Fortran handle, because these are integers in every MPI.
SYNCBN_EXPORT(void*, gluon_syncbn_mpi_transport, int comm) {
  return static_cast<syncbn::Transport*>(new syncbn::MpiTransport(MPI_Comm_f2c(comm)));
}
