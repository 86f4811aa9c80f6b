// Batch normalization of one device's shard on the CPU: the four passes of kernels/passes.h.
// Pointers and sizes only: no locks, no MXNet, and nothing of other devices. Results are the same
// in every run, whatever the number of threads.
#pragma once
#include "kernels/passes.h"

namespace syncbn::cpu {

void LocalMoments(const ReductionPass& pass);
void Normalize(const ElementwisePass& pass);
void BackwardSums(const ReductionPass& pass);
void BackwardApply(const ElementwisePass& pass);

// The instruction set that was chosen for this machine: "avx512", "avx2" or "generic".
const char* InstructionSet();

}  // namespace syncbn::cpu
