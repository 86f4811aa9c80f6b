// See rendezvous.h.
#include "collective/devices/rendezvous.h"

#include <utility>

#include "collective/devices/report.h"
#include "core/error.h"

namespace syncbn {

Bytes Rendezvous::Reduced(ReduceOperation operation) const {
  auto arrival = arrivals.begin();
  Bytes reduced = arrival->second.payload;
  while (++arrival != arrivals.end()) Reduce(operation, arrival->second.payload, &reduced);
  return reduced;
}

Bytes ExchangeAcross(const AllReduceOptions& options, int64_t number, Bytes payload,
                     std::string* error) {
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
  Bytes result;
  try {
    result = across.processes->AllReduce(std::move(own));
    if (result.size() != size) {
      *error = Concat(title, ": other ranks sent ", result.size(), " bytes, expected ", size);
    }
  } catch (const std::exception& raised) {
    *error = raised.what();
  }
  return result;
}

}  // namespace syncbn
