#include "exchange/peers.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "exchange/report.h"

namespace syncbn {

std::vector<int> Peers::RanksOf(const std::vector<int>& group, const Key& key) const {
  if (group.size() == 1) return {};
  if (!transport_ && !group.empty()) {
    throw Error(Concat(key.Title(), ": its group has ", group.size(), " ranks, which must be ",
                       "connected. Call ", kInit, " first."));
  }
  if (size() == 1) return {};
  if (is_forked_) {
    throw Error(Concat(key.Title(), ": called in a process that was forked from rank ", rank(),
                       ". Only the process that called ", kInit, " synchronizes."));
  }
  if (group.empty()) {
    std::vector<int> all(static_cast<size_t>(size()));
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
  if (!std::binary_search(group.begin(), group.end(), rank()) || group.back() >= size()) {
    throw Error(Concat(key.Title(), ": its group must hold rank ", rank(), " and ranks below ",
                       size(), " only, got ranks up to ", group.back(),
                       ". Call gluon_syncbn.revert_sync_batchnorm before a net is exported."));
  }
  return group;
}

bool Peers::Receive(int* from, Message* message) {
  Bytes bytes;
  if (closed() || !transport_->Receive(from, &bytes)) return false;
  *message = Decode(bytes, *from, rank(), size());
  if (message->kind == MessageKind::kPart) latest_[*from] = message->key;
  if (message->kind == MessageKind::kLeave) left_.insert(*from);
  return true;
}

void Peers::Send(int to, Message message) {
  if (closed()) return;
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
    } catch (const Error&) {  // the other ranks are told
    }
  }
}

void Peers::Leave() {
  if (has_left_) return;
  has_left_ = true;
  const std::set<int> left = std::exchange(left_, {});  // they wait for this message
  Tell({MessageKind::kLeave});
  left_ = left;
}

void Peers::Close() {
  if (!closed()) transport_->Close();
  closed_ = true;
}

std::string Peers::LatestOf(int rank) const {
  const auto latest = latest_.find(rank);
  return Concat("which has sent nothing ",
                latest == latest_.end() ? "yet" : "since " + latest->second.Title());
}

}  // namespace syncbn
