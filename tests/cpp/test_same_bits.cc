// The CPU kernels give the same bits for any number of threads. A process reads that number once,
// so the program runs itself in other processes, with an argument, to print a hash of all bits.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "cpu_kernels.h"
#include "kernel_tests.h"

using syncbn::DType;
using syncbn::Layout;

namespace {

void PrintHash() {
  std::string bits;
  for (DType dtype : test::kDTypes) {
    for (const Layout& layout : {Layout{1, 1, 1}, Layout{4, 3, 25}, Layout{2, 5, 1000},
                                 Layout{8, 3, 40000}, Layout{50, 64, 1}, Layout{9000, 3, 1},
                                 Layout{2, 2048, 1}, Layout{6, 40, 49}}) {
      bits += test::Bits<test::CpuKernels>(dtype, layout);
    }
  }
  std::printf("%016zx\n", std::hash<std::string>()(bits));
}

std::string HashWith(int threads, const std::string& program) {
  const std::string command = syncbn::Concat("OMP_NUM_THREADS=", threads, " '", program, "' print");
  FILE* const output = popen(command.c_str(), "r");
  char line[64] = "";
  if (output == nullptr || std::fgets(line, sizeof(line), output) == nullptr) return "";
  return pclose(output) == 0 ? line : "";
}

}  // namespace

int main(int arguments, char** values) {
  if (arguments > 1) {
    PrintHash();
    return check::Result();
  }
  const std::string one = HashWith(1, values[0]);
  CHECK_EQ(one.size(), 17u);
  for (int threads : {2, 5}) CHECK_EQ(HashWith(threads, values[0]), one);
  return check::Result();
}
