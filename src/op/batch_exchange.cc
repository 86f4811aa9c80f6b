#include "op/batch_exchange.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "collective/common/timeout.h"
#include "core/error.h"
#include "op/registry.h"

namespace syncbn {
namespace {

void Append(const std::vector<double>& part, std::vector<double>* numbers) {
  numbers->insert(numbers->end(), part.begin(), part.end());
}

// The next `size` of some numbers.
std::vector<double> Take(std::vector<double>::const_iterator* from, size_t size) {
  const auto begin = *from;
  *from += static_cast<std::ptrdiff_t>(size);
  return {begin, *from};
}

}  // namespace

Ticket BatchExchange::BeginForward() {
  // A program can swallow an error, and call the layers after the one that has failed. They fail at
  // once, because a device that has failed in one layer may not come to the others.
  if (Group::failed > 0 && !IsAlone()) {
    const std::string failure = Registry::Get().FirstFailure();
    if (!failure.empty()) group_->Fail(failure);
  }
  return group_->BeginForward(device_, static_cast<size_t>(options_.num_devices));
}

BatchMoments BatchExchange::Merge(const Call& call, BatchMoments own) {
  const size_t channels = own.mean.size();
  std::vector<double> numbers{own.count};
  Append(own.mean, &numbers);
  Append(own.m2, &numbers);
  numbers = AllReduce(call, ReduceOperation::kMoments, numbers);
  auto from = numbers.cbegin();
  own.count = *from++;
  own.mean = Take(&from, channels);
  own.m2 = Take(&from, channels);
  return own;
}

GradientSums BatchExchange::Add(const Call& call, GradientSums own) {
  const size_t channels = own.dz.size();
  std::vector<double> numbers = own.dz;
  Append(own.dz_xmu, &numbers);
  numbers = AllReduce(call, ReduceOperation::kSumFloat64, numbers);
  auto from = numbers.cbegin();
  own.dz = Take(&from, channels);
  own.dz_xmu = Take(&from, channels);
  return own;
}

std::string BatchExchange::Join(const Call& call, const std::string& own) {
  if (IsAlone()) return own;
  AllReduceOptions options = OptionsOf(call);
  options.repeat = 1;
  options.contribution.operation = ReduceOperation::kConcat;
  options.arrival.payload.text = own;
  return group_->AllReduce(std::move(options))->payload.text;
}

std::vector<double> BatchExchange::AllReduce(const Call& call, ReduceOperation operation,
                                        const std::vector<double>& own) {
  if (IsAlone()) {
    group_->Check(*call.ticket, call.phase, device_);  // another device may call the layer as well
    return own;
  }
  AllReduceOptions options = OptionsOf(call);
  options.contribution.operation = operation;
  options.arrival.payload.numbers = own;
  const std::shared_ptr<const Reduced> reduced = group_->AllReduce(std::move(options));
  call.ticket->key = reduced->key;
  return reduced->payload.numbers;
}

// Without payload and operation.
AllReduceOptions BatchExchange::OptionsOf(const Call& call) const {
  AllReduceOptions options;
  options.ticket = *call.ticket;
  options.phase = call.phase;
  options.repeat = call.repeat;
  options.device = device_;
  options.size = static_cast<size_t>(options_.num_devices);
  options.expected = options_.contexts;
  options.processes = Processes();
  options.shared_name = options_.shared_name;
  Contribution& own = options.contribution;
  own.timeout_seconds = options_.timeout > 0 ? options_.timeout : default_timeout.load();
  own.ranks = options_.ranks;
  own.signature = Concat("channels=", call.layout.channels, ", dtype=", Name(call.x.dtype),
                         ", axis=", options_.axis, ", epsilon=", options_.epsilon);
  if (options_.nonfinite == NonFinite::kRaise) own.signature += ", nonfinite=raise";
  options.arrival.signature = Concat(own.signature, ", num_devices=", options_.num_devices);
  options.arrival.shape = ShapeText(call.x.shape);
  return options;
}

void BatchExchange::Fail(const std::string& text, bool between_processes) {
  group_->Fail(text);
  Communicator* const processes = between_processes ? Processes() : nullptr;
  if (processes != nullptr) processes->Fail(text);
  throw Error(text);
}

int BatchExchange::Rank() const { return Processes() == nullptr ? -1 : Processes()->rank(); }

// The processes to synchronize with; null for none.
Communicator* BatchExchange::Processes() const {
  if (options_.ranks.size() == 1) return nullptr;
  Communicator* processes = TheCommunicator();
  if (processes == nullptr && !options_.ranks.empty()) {
    throw Error(Concat("SyncBatchNorm '", group_->layer(), "': its group has ",
                       options_.ranks.size(), " ranks, but gluon_syncbn.distributed.init() was not "
                       "called in this process"));
  }
  if (processes == nullptr || processes->size() == 1) return nullptr;
  const std::vector<int>& ranks = options_.ranks;
  const bool is_member = std::binary_search(ranks.begin(), ranks.end(), processes->rank());
  if (!ranks.empty() && (!is_member || ranks.back() >= processes->size())) {
    throw Error(Concat("SyncBatchNorm '", group_->layer(), "': its group must hold rank ",
                       processes->rank(), " and ranks below ", processes->size(), " only, got ",
                       "ranks up to ", ranks.back(), "; call gluon_syncbn.revert_sync_batchnorm "
                       "before a net is exported"));
  }
  return processes;
}

}  // namespace syncbn
