// Messages between processes, over MPI or the queues of a test. The mutex of Table (table.h) is
// locked in every call, so an implementation needs no lock.
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

  // Returns true until all messages are sent. The result changes only in Send and Receive.
  virtual bool Busy() const = 0;

  virtual void Close() = 0;  // no call of Send, Receive or Busy may follow

  // Registers a function that MPI_Finalize calls before it waits for all processes. If the function
  // returns false, MPI_Abort ends all processes.
  virtual void OnFinalize(std::function<bool()> function) = 0;
};

}  // namespace syncbn
