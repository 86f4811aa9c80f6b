// Tests the CPU kernels, see kernel_tests.h. CMake registers it once for each instruction set.
#include <iostream>

#include "cpu_kernels.h"
#include "kernel_tests.h"

namespace cpu = syncbn::cpu;
using syncbn::Layout;

int main() {
  std::cout << cpu::InstructionSet() << std::endl;
  test::TestAll<test::CpuKernels>(
      {{1, 1, 1},    {3, 5, 7},     {2, 3, 64},     {2, 3, 65},   {5, 3, 1},    {20011, 3, 1},
       {7, 1024, 1}, {3, 1025, 1},  {2, 2048, 1},   {37, 17, 3},  {4, 6, 1023}, {1, 2, 40001},
       {9, 33, 49},  {530, 130, 1}, {60, 3, 700},   {3, 2000, 2}, {1, 70000, 1}, {12, 40, 127}});
  for (const Layout& layout : {Layout{0, 4, 5}, Layout{3, 4, 0}})
    CHECK_EQ(cpu::WorkspaceBytes(layout), 0);
  return check::Result();
}
