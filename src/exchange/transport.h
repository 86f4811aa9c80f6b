// The interface for messages between processes, over MPI or the queues of a test. A Table calls it
// with a locked mutex, so an implementation needs no lock.
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

  // Starts to send, without waiting. Messages from one process to another arrive in order.
  virtual void Send(int to, Bytes message) = 0;

  // Takes the next complete message. Returns false if none has arrived.
  virtual bool Receive(int* from, Bytes* message) = 0;

  // Returns true while a sent message is pending. Only calls of Receive let it make progress.
  virtual bool Busy() const = 0;

  virtual void Close() = 0;

  // Calls `closing` when the program calls MPI_Finalize, which waits for all processes. If
  // `closing` returns false, ends all processes instead.
  virtual void OnClose(std::function<bool()> closing) = 0;
};

}  // namespace syncbn
