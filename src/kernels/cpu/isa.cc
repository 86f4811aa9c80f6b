// Chooses the instruction set at run time.
// Who uses it: batch_norm_cpu.cc. It must not know what the kernels compute.
#include "kernels/cpu/isa.h"

#include <cstdlib>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace syncbn::cpu {
namespace {

#if defined(SYNCBN_HAVE_AVX2) || defined(SYNCBN_HAVE_AVX512)
// Older compilers' __builtin_cpu_supports does not know the name "f16c".
bool HasF16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && HasF16c();
}
#endif

const Isa* Detect() {
  const char* variable = std::getenv("GLUON_SYNCBN_INSTRUCTION_SET");
  const std::string limit = variable == nullptr ? "" : variable;
  if (limit == kGeneric.name) return &kGeneric;
#if defined(SYNCBN_HAVE_AVX512)
  if (limit != "avx2" && HasAvx2() && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return &kAvx512;
#endif
#if defined(SYNCBN_HAVE_AVX2)
  if (HasAvx2()) return &kAvx2;
#endif
  return &kGeneric;
}

}  // namespace

const Isa& ChooseIsa() {
  static const Isa* const isa = Detect();
  return *isa;
}

}  // namespace syncbn::cpu
