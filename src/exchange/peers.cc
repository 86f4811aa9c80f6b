#include "exchange/peers.h"

#include <utility>

#include "core/error.h"

namespace syncbn {

bool Peers::Receive(int* from, Message* message) {
  Bytes bytes;
  if (closed_ || !transport_->Receive(from, &bytes)) return false;
  *message = Decode(bytes, *from, rank(), size());
  if (message->kind == MessageKind::kPart) latest_[*from] = message->key;
  if (message->kind == MessageKind::kLeave) left_.insert(*from);
  return true;
}

void Peers::Send(int to, Message message) {
  if (closed_) return;
  if (static_cast<int>(message.ranks.size()) == size()) message.ranks.clear();
  try {
    transport_->Send(to, Encode(message));
  } catch (const std::exception& error) {
    throw Error(Concat("sending to rank ", to, " failed: ", error.what()));
  }
}

void Peers::Tell(const Message& message) {
  for (int to = 0; to < size(); ++to) {
    if (to == rank() || HasLeft(to)) continue;
    try {
      Send(to, message);
    } catch (const Error&) {  // to one rank; the others are told
    }
  }
}

void Peers::Leave() {
  if (has_left_) return;
  has_left_ = true;
  const std::set<int> left = std::exchange(left_, {});  // they wait for it
  Tell({MessageKind::kLeave});
  left_ = left;
}

void Peers::Close() {
  if (!closed_) transport_->Close();
  closed_ = true;
}

std::string Peers::LatestOf(int rank) const {
  const auto latest = latest_.find(rank);
  return Concat("which has sent nothing ",
                latest == latest_.end() ? "yet" : "since " + latest->second.Title());
}

}  // namespace syncbn
