// The other ranks of the program: messages to and from them, their latest messages, and the ranks
// that have left. The mutex of a Table guards it.
#pragma once
#include <map>
#include <memory>
#include <set>
#include <string>

#include "exchange/message.h"

namespace syncbn {

class Peers {
 public:
  explicit Peers(std::unique_ptr<Transport> transport) : transport_(std::move(transport)) {}

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }

  // Receives and checks the next message. Returns false if no message has arrived. Throws Error.
  bool Receive(int* from, Message* message);
  // Throws Error.
  void Send(int to, Message message);
  // Sends to all ranks that have not left.
  void Broadcast(const Message& message);
  // Returns true while a pending message needs calls of Receive to complete.
  bool Busy() const { return !closed_ && transport_->Busy(); }

  // Reports to all other ranks, also to ranks that have left, that this rank sends nothing more.
  void Leave();
  bool has_left() const { return has_left_; }
  bool HasLeft(int rank) const { return left_.count(rank) > 0; }
  bool AllHaveLeft() const { return static_cast<int>(left_.size()) == size() - 1; }

  // Closes the transport.
  void Close();
  bool closed() const { return closed_; }

  // Returns a text like "which has sent nothing since SyncBatchNorm 'norm0', forward".
  std::string LatestMessage(int rank) const;

 private:
  const std::unique_ptr<Transport> transport_;
  std::map<int, Key> latest_;  // the key of each rank's latest part
  std::set<int> left_;
  bool has_left_ = false, closed_ = false;
};

}  // namespace syncbn
