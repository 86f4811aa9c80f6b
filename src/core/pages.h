// A hint to the system about memory that is about to be written for the first time.
// Who uses it: op, for outputs. It must not know what is written.
//
// Outside static graphs MXNet takes every output fresh from the system and gives it back after the
// step. Faulting 30 MB in by 4 KB pages takes several times as long as computing them, by 2 MB pages
// less than half of that.
#pragma once
#include <cstddef>

namespace syncbn {

// Does nothing for small memory, or where the system has no huge pages.
void ExpectLargeWrite(void* data, size_t bytes);

}  // namespace syncbn
