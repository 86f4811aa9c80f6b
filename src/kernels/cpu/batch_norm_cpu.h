// Batch normalization of one device's shard on the CPU: the four passes of kernels/passes.h.
// Who uses it: op. Pointers and sizes only: no locks, no allocation, no MXNet, and nothing of other
// devices. Results are the same in every run, whatever the number of threads.
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

// LocalMoments, `between`, Normalize; BackwardSums, `between`, BackwardApply. Where it pays, blocks
// of channels go through all three one after the other, so that their elements are still in cache:
// then `between` is called for each, from several threads at once. It must not throw. The results
// are those of the three, bit for bit.
void MomentsAndNormalize(const MomentsPass& moments, const Between& between,
                         const NormalizePass& normalize, void* workspace);
void SumsAndApply(const SumsPass& sums, const Between& between, const ApplyPass& apply,
                  void* workspace);

// The instruction set that was chosen for this machine: "avx512", "avx2" or "generic".
const char* InstructionSet();

}  // namespace syncbn::cpu
