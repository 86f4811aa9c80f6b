// The other processes and their messages. Table (table.h) calls Peers with a locked mutex.
#pragma once
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "exchange/message.h"

namespace syncbn {

class Peers {
 public:
  // Before this call the process is rank 0 of 1.
  void Connect(std::unique_ptr<Transport> transport) { transport_ = std::move(transport); }
  // Marks this process as a fork, which must not use the connection of its parent.
  void SetForked() { is_forked_ = true; }
  bool IsConnected() const { return size() > 1 && !is_forked_; }

  int rank() const { return transport_ ? transport_->rank() : 0; }
  int size() const { return transport_ ? transport_->size() : 1; }

  // Returns the ranks that take part in an exchange, ascending, or none if only this process does.
  // An empty `group` means all ranks. Throws Error in a fork if other ranks take part.
  std::vector<int> RanksOf(std::vector<int> group, const Key& key) const;

  // Takes the next message. Returns false if none has arrived. Throws Error if it is invalid.
  bool Receive(int* from, Message* message);
  // Throws Error if the transport fails.
  void Send(int to, const Message& message);
  // Sends a message to all other ranks, and ignores errors.
  void Broadcast(const Message& message);
  bool Busy() const { return !closed() && transport_->Busy(); }  // see Transport::Busy

  // Announces to all ranks that this process sends nothing more. It receives until Close.
  void Leave();
  bool has_left() const { return has_left_; }
  bool PeerHasLeft(int rank) const { return left_.count(rank) > 0; }
  bool AllHaveLeft() const { return static_cast<int>(left_.size()) == size() - 1; }
  std::vector<int> Staying() const;  // the other ranks that have not left

  void Close();
  // Returns true also in a fork and before Connect.
  bool closed() const { return closed_ || is_forked_ || !transport_; }

 private:
  std::unique_ptr<Transport> transport_;
  std::set<int> left_;
  bool is_forked_ = false, has_left_ = false, closed_ = false;
};

}  // namespace syncbn
