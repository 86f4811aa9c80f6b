// Batch normalization of one device's shard on the CPU: the four passes of kernels/passes.h.
// Pointers and sizes only: no locks, no allocation, no MXNet, and nothing of other devices. Results
// are the same in every run, whatever the number of threads.
#pragma once
#include <cstdint>

#include "kernels/passes.h"

namespace syncbn::cpu {

// Bytes of scratch that every function with a `workspace` needs for this layout; the caller owns
// it.
int64_t WorkspaceBytes(const Layout& layout);

void LocalMoments(const MomentsPass& pass, void* workspace);
void Normalize(const NormalizePass& pass);
void BackwardSums(const SumsPass& pass, void* workspace);
void BackwardApply(const ApplyPass& pass);

// The instruction set that was chosen for this machine: "avx512", "avx2" or "generic".
const char* InstructionSet();

}  // namespace syncbn::cpu
