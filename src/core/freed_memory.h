// Keeps the memory that arrays on CPUs free, for the next step. It must not know what the memory
// holds.
//
// Outside static graphs MXNet takes every array from the C library and frees it in the same step.
// Large pieces go back to the system, and faulting 30 MB in takes longer than normalizing them.
#pragma once

namespace syncbn {

// Tells the C library once, for this process and its children. A no-op with a C library other than
// glibc, or where GLUON_SYNCBN_KEEP_MEMORY is 0.
void KeepFreedMemory();

}  // namespace syncbn
