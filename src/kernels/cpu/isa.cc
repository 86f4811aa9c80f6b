// Chooses the instruction set at run time.
#include <cstdlib>
#include <string>

#include "kernels/cpu/passes.h"
#include "kernels/cpu/tiles.h"

namespace syncbn::cpu {
namespace {

// The widest that both this build and this machine have; no wider than the one that the variable
// GLUON_SYNCBN_INSTRUCTION_SET names ("generic", "avx2", "avx512"), for the same results on
// different machines, and for tests.
const Isa* Detect() {
  const char* variable = std::getenv("GLUON_SYNCBN_INSTRUCTION_SET");
  const std::string limit = variable == nullptr ? "" : variable;
  if (limit == kGeneric.name) return &kGeneric;
#if defined(SYNCBN_WIDE_KERNELS)
  // Every processor with AVX2 has F16C, whose name older compilers do not know here.
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
