// The other processes of the program, as one of them sees them: who has left, what each has sent
// last, and the messages to and from them. A Table guards it with its mutex.
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

  // The next message, checked; false if none has arrived. Throws Error.
  bool Receive(int* from, Message* message);
  // Throws Error.
  void Send(int to, Message message);
  // To all that have not left.
  void Tell(const Message& message);
  // True while a message is under way that goes on only in calls of Receive.
  bool Busy() const { return !closed_ && transport_->Busy(); }

  // Tells the others, also those that have left, that this process sends nothing more.
  void Leave();
  bool has_left() const { return has_left_; }
  bool HasLeft(int rank) const { return left_.count(rank) > 0; }
  bool AllHaveLeft() const { return static_cast<int>(left_.size()) == size() - 1; }

  // Ends the use of the transport.
  void Close();
  bool closed() const { return closed_; }

  // "which has sent nothing since SyncBatchNorm 'norm0', forward"
  std::string LatestOf(int rank) const;

 private:
  const std::unique_ptr<Transport> transport_;
  std::map<int, Key> latest_;  // of the parts of each rank
  std::set<int> left_;
  bool has_left_ = false, closed_ = false;
};

}  // namespace syncbn
