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

Bytes Rendezvous::ReducePayloads(ReduceOperation operation) const {
  auto arrival = arrivals.begin();
  Bytes reduced = arrival->second.payload;
  while (++arrival != arrivals.end()) Reduce(operation, arrival->second.payload, &reduced);
  return reduced;
}

void ExchangeBetweenProcesses(const AllReduceOptions& options, Reduced* result) {
  if (result->key.empty()) result->key = options.processes->NextKey(options.shared_name);
  const size_t size = result->payload.size();
  Contribution own = options.contribution;
  own.key = Concat(result->key, '|', options.phase, '|', options.repeat);
  own.title = Title(options.shared_name, options.phase);
  own.payload = std::move(result->payload);
  const std::string title = own.title;
  result->payload = options.processes->AllReduce(std::move(own));
  const bool fits = result->payload.size() == size;
  if (fits || options.contribution.operation == ReduceOperation::kConcat) return;
  throw Error(Concat(title, ": other ranks sent ", result->payload.size(), " bytes, expected ",
                     size));
}

}  // namespace syncbn
