#include "collective/devices/rendezvous.h"

#include <utility>

#include "collective/devices/report.h"
#include "core/error.h"

namespace syncbn {

void Rendezvous::Add(const Device& device, Arrival arrival) {
  if (arrivals.count(device)) throw Error(TwiceReport(device));
  if (!arrivals.empty() && arrivals.begin()->second.signature != arrival.signature) {
    throw Error(DisagreementReport(*arrivals.begin(), {device, arrival}));
  }
  arrivals.emplace(device, std::move(arrival));
}

Payload Rendezvous::ReducePayloads(ReduceOperation operation) const {
  auto arrival = arrivals.begin();
  Payload reduced = arrival->second.payload;
  while (++arrival != arrivals.end()) Reduce(operation, arrival->second.payload, &reduced);
  return reduced;
}

void ExchangeBetweenProcesses(const AllReduceOptions& options, Reduced* result) {
  if (result->key.empty()) result->key = options.processes->NextKey(options.shared_name);
  Payload& payload = result->payload;
  const bool is_text = options.contribution.operation == ReduceOperation::kConcat;
  Contribution own = options.contribution;
  own.key = Concat(result->key, '|', options.phase, '|', options.repeat);
  own.title = Title(options.shared_name, options.phase);
  own.payload = is_text ? Bytes(payload.text.begin(), payload.text.end())
                        : ToBytes(payload.numbers);
  const std::string title = own.title;
  const Bytes all = options.processes->AllReduce(std::move(own));
  if (is_text) {
    payload.text.assign(all.begin(), all.end());
    return;
  }
  const size_t size = payload.numbers.size();
  payload.numbers = FromBytes<double>(all);
  if (payload.numbers.size() == size) return;
  throw Error(Concat(title, ": other ranks sent ", payload.numbers.size(), " numbers, expected ",
                     size));
}

}  // namespace syncbn
