// Messages between processes, over MPI or the queues of a test. A Table calls a transport under
// its mutex, so an implementation needs no lock.
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

  // Start to send, and never wait. Messages from one process to another arrive in order.
  virtual void Send(int to, Bytes message) = 0;

  // Take the next complete message. Return false if none has arrived.
  virtual bool Receive(int* from, Bytes* message) = 0;

  // Return true while a message is under way that makes progress only in calls of Receive.
  virtual bool Busy() const = 0;

  // End all use of the medium.
  virtual void Close() = 0;

  // Call `closing`, in any thread, before the program ends the medium (MPI_Finalize), which waits
  // for all processes. If `closing` returns false, end all processes instead.
  virtual void OnClose(std::function<bool()> closing) = 0;
};

}  // namespace syncbn
