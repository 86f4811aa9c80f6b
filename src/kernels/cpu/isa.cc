// Chooses the instruction set at run time. It must not know what the kernels compute.
#include "kernels/cpu/isa.h"

#include <cstdlib>
#include <string>

namespace syncbn::cpu {
namespace {

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

}  // namespace

const Isa& ChooseIsa() {
  static const Isa* const isa = Detect();
  return *isa;
}

}  // namespace syncbn::cpu
