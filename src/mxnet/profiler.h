// Spans as tasks of `mx.profiler`.
#pragma once

namespace syncbn {

// LoadMxnetApi must be called first.
void ShowSpansInMxnetProfiler();

}  // namespace syncbn
