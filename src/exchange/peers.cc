#include "exchange/peers.h"

#include <numeric>
#include <utility>

#include "core/error.h"

namespace syncbn {

std::vector<int> Peers::RanksOf(std::vector<int> group, const Key& key) const {
  if (group.size() == 1 || size() == 1) return {};
  if (is_forked_) {
    throw Error(
        Concat(key.Title(), ": called in a process that was forked from rank ", rank(),
               ". Only the process that called gluon_syncbn.distributed.init() synchronizes."));
  }
  if (!group.empty()) return group;
  std::vector<int> all(static_cast<size_t>(size()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

bool Peers::Receive(int* from, Message* message) {
  Bytes bytes;
  if (closed() || !transport_->Receive(from, &bytes)) return false;
  *message = Decode(bytes);
  if (std::holds_alternative<LeaveMessage>(*message)) left_.insert(*from);
  return true;
}

void Peers::Send(int to, const Message& message) {
  try {
    transport_->Send(to, Encode(message));
  } catch (const std::exception& error) {
    throw Error(Concat("sending to rank ", to, " failed: ", error.what()));
  }
}

void Peers::Broadcast(const Message& message) {
  for (int to = 0; to < size(); ++to) {
    // A rank that has left waits only for the other ranks' last messages.
    if (to == rank() || (PeerHasLeft(to) && !std::holds_alternative<LeaveMessage>(message)))
      continue;
    try {
      Send(to, message);
    } catch (const Error&) {
      // The other ranks still get the message.
    }
  }
}

void Peers::Leave() {
  if (std::exchange(has_left_, true)) return;
  Broadcast(LeaveMessage());
}

std::vector<int> Peers::Staying() const {
  std::vector<int> staying;
  for (int other = 0; other < size(); ++other) {
    if (other != rank() && !PeerHasLeft(other)) staying.push_back(other);
  }
  return staying;
}

void Peers::Close() {
  if (!closed()) transport_->Close();
  closed_ = true;
}

}  // namespace syncbn
