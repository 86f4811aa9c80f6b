// Carries messages between processes, by MPI or by the queues of a test. A Table calls it under its
// mutex, so an implementation needs no lock.
#pragma once
#include <functional>
#include <vector>

namespace syncbn {

using Bytes = std::vector<char>;

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Starts to send and never blocks. Messages from one rank to another arrive in order.
  virtual void Send(int to, Bytes message) = 0;

  // Receives the next complete message. Returns false if no message has arrived.
  virtual bool Receive(int* from, Bytes* message) = 0;

  // Returns true while a pending message needs calls of Receive to complete.
  virtual bool Busy() const = 0;

  // Ends all use of MPI.
  virtual void Close() = 0;

  // Calls `closing`, on any thread, before the program calls MPI_Finalize, which waits for all
  // ranks. If `closing` returns false, all ranks are aborted instead.
  virtual void OnClose(std::function<bool()> closing) = 0;
};

}  // namespace syncbn
