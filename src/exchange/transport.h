// Carries messages between processes: a small part of MPI, or the queues of a test. A Table calls
// it under its mutex, so an implementation needs no lock.
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

  // Starts to send; never waits. Messages from one process to another arrive in order.
  virtual void Send(int to, Bytes message) = 0;

  // Takes the next complete message; false if none has arrived.
  virtual bool Receive(int* from, Bytes* message) = 0;

  // True while a message is under way that makes progress only in calls of Receive.
  virtual bool Busy() const = 0;

  // Ends all use of the medium.
  virtual void Close() = 0;

  // `closing` is called, in whatever thread, before the program ends the medium (MPI_Finalize),
  // which waits for all processes. Where it returns false, all are ended instead.
  virtual void OnClose(std::function<bool()> closing) = 0;
};

}  // namespace syncbn
