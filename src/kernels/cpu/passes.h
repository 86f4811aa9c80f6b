// The four passes of kernels/passes.h on the CPU. Results are the same in every run, whatever the
// number of threads.
#pragma once
#include "kernels/passes.h"

namespace syncbn::cpu {

void LocalMoments(const ReductionPass& pass);
void Normalize(const ElementwisePass& pass);
void BackwardSums(const ReductionPass& pass);
void BackwardApply(const ElementwisePass& pass);

// The instruction set that this machine uses: "avx512", "avx2" or "generic".
const char* InstructionSet();

}  // namespace syncbn::cpu
