// How the shards' numbers become the whole batch's: the two reductions of the layer.
// Who uses it: sync_batch_norm.cc and the native tests.
#pragma once
#include "collective/round.h"

namespace syncbn {

// Payloads are (count, mean[C], m2[C]); merged in the order of the devices. Between processes it is
// the merger "moments".
void MergeMoments(const std::vector<const Payload*>& payloads, Payload* result);

// Payloads of equal length, added up in the order of the devices; between processes "sum_float64".
void Sum(const std::vector<const Payload*>& payloads, Payload* result);

}  // namespace syncbn
