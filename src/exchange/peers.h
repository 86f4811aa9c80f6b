// The other processes of the program: who has left, and the messages to and from them. A Table
// guards it with its mutex.
#pragma once
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "exchange/message.h"

namespace syncbn {

class Peers {
 public:
  // Until this call the process is rank 0 of 1.
  void Connect(std::unique_ptr<Transport> transport) { transport_ = std::move(transport); }
  // A fork does not copy the connection to the other processes.
  void SetForked() { is_forked_ = true; }
  bool is_forked() const { return is_forked_; }
  bool IsConnected() const { return size() > 1 && !is_forked_; }

  int rank() const { return transport_ ? transport_->rank() : 0; }
  int size() const { return transport_ ? transport_->size() : 1; }

  // Return the ranks that take part in an exchange, ascending; none for this process alone. An
  // empty `group` means all ranks. Throws Error if this process is not in the group.
  std::vector<int> RanksOf(const std::vector<int>& group, const Key& key) const;

  // Take the next message, which is checked; false if none has arrived. Throws Error.
  bool Receive(int* from, Message* message);
  // Throws Error.
  void Send(int to, const Message& message);
  // Send a message to all ranks that may wait for it.
  void Tell(const Message& message);
  // True while a message is under way that makes progress only in calls of Receive.
  bool Busy() const { return !closed() && transport_->Busy(); }

  // Tell all ranks, also those that have left, that this process sends nothing more.
  void Leave();
  bool has_left() const { return has_left_; }
  bool HasLeft(int rank) const { return left_.count(rank) > 0; }
  bool AllHaveLeft() const { return static_cast<int>(left_.size()) == size() - 1; }

  // End the use of the transport.
  void Close();
  bool closed() const { return closed_ || is_forked_ || !transport_; }

 private:
  std::unique_ptr<Transport> transport_;
  std::set<int> left_;
  bool is_forked_ = false, has_left_ = false, closed_ = false;
};

}  // namespace syncbn
