// Arrivals and their reduction, and the exchange with other processes.
#include "collective/devices/rendezvous.h"

#include <utility>

#include "collective/devices/report.h"
#include "core/error.h"

namespace syncbn {

bool Rendezvous::Arrive(AllReduceOptions* options) {
  const Device& device = options->device;
  if (arrivals.count(device)) throw Error(TwiceReport(device));
  if (!arrivals.empty() && arrivals.begin()->second.signature != options->arrival.signature) {
    throw Error(DisagreementReport(*arrivals.begin(), {device, options->arrival}));
  }
  arrivals.emplace(device, std::move(options->arrival));
  return arrivals.size() == options->size;
}

Bytes Rendezvous::Reduced(ReduceOperation operation) const {
  auto arrival = arrivals.begin();
  Bytes reduced = arrival->second.payload;
  while (++arrival != arrivals.end()) Reduce(operation, arrival->second.payload, &reduced);
  return reduced;
}

Bytes ExchangeAcross(const AllReduceOptions& options, int64_t number, Bytes payload) {
  const AcrossProcesses& across = options.across;
  const size_t size = payload.size();
  Contribution own;
  own.key = Concat(across.name, '|', options.phase, '|', number, '|', options.repeat);
  own.title = Title(across.name, options.phase);
  own.signature = across.signature;
  own.operation = options.operation;
  own.ranks = across.ranks;
  own.timeout_seconds = options.timeout_seconds;
  own.payload = std::move(payload);
  const std::string title = own.title;
  Bytes result = across.processes->AllReduce(std::move(own));
  if (result.size() == size || options.operation == ReduceOperation::kConcat) return result;
  throw Error(Concat(title, ": other ranks sent ", result.size(), " bytes, expected ", size));
}

}  // namespace syncbn
