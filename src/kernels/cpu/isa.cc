// Chooses the instruction set at run time.
#include <cstdlib>
#include <string>

#include "kernels/cpu/passes.h"
#include "kernels/cpu/tiles.h"

namespace syncbn::cpu {
namespace {

// Returns the widest set that this build and this machine have, and no wider than
// GLUON_SYNCBN_INSTRUCTION_SET ("generic", "avx2", "avx512"). The variable gives the same results
// on different machines, and tests use it.
const Isa* Detect() {
  const char* variable = std::getenv("GLUON_SYNCBN_INSTRUCTION_SET");
  const std::string limit = variable == nullptr ? "" : variable;
  if (limit == kGeneric.name) return &kGeneric;
#if defined(SYNCBN_WIDE_KERNELS)
  // Every processor with AVX2 has F16C, for which older compilers have no name here.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 && limit != kAvx2.name ? &kAvx512 : &kAvx2;
  }
#endif
  return &kGeneric;
}

const Isa& TheIsa() {
  static const Isa* const isa = Detect();
  return *isa;
}

}  // namespace

void LocalMoments(const ReductionPass& pass) { TheIsa().local_moments(pass); }
void Normalize(const ElementwisePass& pass) { TheIsa().normalize(pass); }
void BackwardSums(const ReductionPass& pass) { TheIsa().backward_sums(pass); }
void BackwardApply(const ElementwisePass& pass) { TheIsa().backward_apply(pass); }

const char* InstructionSet() { return TheIsa().name; }

}  // namespace syncbn::cpu
