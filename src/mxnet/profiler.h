// Spans as tasks of `mx.profiler`.
// Who uses it: custom_op.cc, before operators are made.
#pragma once

namespace syncbn {

// LoadMxnetApi must be called first.
void ShowSpansInMxnetProfiler();

}  // namespace syncbn
