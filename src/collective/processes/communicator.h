// The processes of one program, and how a process exchanges numbers with the others: a Protocol
// (protocol.h has what it promises), any number of threads that wait, and a transport.
// It must not know what carries messages (transport.h), nor what the bytes mean.
//
// There is no thread of its own: who waits carries the messages, polling, first without a pause
// and then with longer ones, always without the mutex between two looks.
#pragma once
#include <memory>
#include <mutex>
#include <string>

#include "collective/processes/protocol.h"
#include "collective/processes/transport.h"

namespace syncbn {

class Communicator {
 public:
  explicit Communicator(std::unique_ptr<Transport> transport);
  ~Communicator() { Stop(); }

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }

  // Blocks until every rank has contributed; returns all payloads reduced in the order of ranks,
  // the same bytes on every rank. Throws Error that names the ranks present and missing if that
  // takes longer than the timeout, if signatures differ, or if another rank has failed.
  Bytes AllReduce(Contribution contribution);

  // The key of the next call of this name, for calls that match by their order on the ranks.
  std::string NextKey(const std::string& name);

  // Fails the exchanges of this process and of all others, for good.
  void Fail(const std::string& text);
  // The text of the failure, also of one of which a message has come; empty if nothing has failed.
  std::string Failure();

  // Tells the other ranks that this process ends, and ends its waits. Returns at once.
  void Leave();
  // Waits until every other rank has left as well, or for the timeout, which is short after a
  // failure.
  void AwaitLeave(double timeout_seconds);
  // Ends the use of the transport. Nothing works afterwards.
  void Stop();
  // Leaves and stops. False if something has failed and another rank does not leave: it hangs, or
  // was stopped.
  bool Close();

 private:
  using Lock = std::unique_lock<std::mutex>;

  void AwaitLeaveFor(double timeout_seconds);
  bool ServeLocked();
  template <typename Predicate>
  void WaitLocked(Lock* lock, const Predicate& over);
  void CheckNotForked(const std::string& title) const;

  const std::unique_ptr<Transport> transport_;
  std::mutex mutex_;
  Protocol protocol_;
  bool closed_ = false;
};

// To the processes that this one was started with; null until OpenCommunicator. Never destroyed,
// because operators may outlive static destructors.
Communicator* TheCommunicator();
void OpenCommunicator(std::unique_ptr<Transport> transport);

}  // namespace syncbn
