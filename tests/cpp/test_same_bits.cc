// The CPU kernels give the same bits for any number of threads. That number is read once in a
// process, so the program runs itself, with an argument, in processes of their own: those print a
// hash of all bits.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "core/error.h"
#include "kernels/cpu/batch_norm_cpu.h"
#include "same_values.h"

namespace cpu = syncbn::cpu;
using syncbn::DType;
using syncbn::Layout;
using syncbn::Request;
using test::Tensor;

namespace {

// FNV-1a.
struct Hash {
  uint64_t value = 14695981039346656037u;

  void Add(const void* data, size_t bytes) {
    const unsigned char* const at = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) value = (value ^ at[i]) * 1099511628211u;
  }
  void Add(const std::vector<double>& values) {
    Add(values.data(), values.size() * sizeof(double));
  }
};

// Moments, then y; sums, then dx: the layer on one device.
void AddBits(DType dtype, const Layout& layout, Hash* hash) {
  Tensor x = test::Random(dtype, layout.Size(), 0, 1);
  Tensor dy = test::Random(dtype, layout.Size(), 0, 2);
  Tensor y(dtype, layout.Size()), dx(dtype, layout.Size());
  const size_t channels = static_cast<size_t>(layout.channels);
  std::vector<double> mean(channels), m2 = mean, sum_dz = mean, sum_dz_u = mean;
  const std::vector<double> offset(channels, 0.25);
  std::vector<char> workspace(static_cast<size_t>(cpu::WorkspaceBytes(layout)));
  cpu::LocalMoments({dtype, layout, x.data(), mean.data(), m2.data()}, workspace.data());
  cpu::Normalize({dtype, layout, x.data(), mean.data(), offset.data(), offset.data(), {},
                  Request::kWrite, y.data()});
  const syncbn::BackwardInput input{dtype, layout,      x.data(), dy.data(), {},
                                    false, mean.data(), nullptr,  nullptr};
  cpu::BackwardSums({input, sum_dz.data(), sum_dz_u.data()}, workspace.data());
  cpu::BackwardApply({input, offset.data(), sum_dz_u.data(), sum_dz.data(), Request::kWrite,
                      dx.data()});
  for (const auto* vector : {&mean, &m2, &sum_dz, &sum_dz_u}) hash->Add(*vector);
  const size_t bytes = static_cast<size_t>(layout.Size()) * syncbn::SizeOf(dtype);
  for (Tensor* tensor : {&y, &dx}) hash->Add(tensor->data(), bytes);
}

void PrintHash() {
  Hash hash;
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBfloat16}) {
    for (const Layout& layout : {Layout{1, 1, 1}, Layout{4, 3, 25}, Layout{2, 5, 1000},
                                 Layout{8, 3, 40000}, Layout{50, 64, 1}, Layout{9000, 3, 1},
                                 Layout{2, 2048, 1}, Layout{6, 40, 49}}) {
      AddBits(dtype, layout, &hash);
    }
  }
  std::printf("%016llx\n", static_cast<unsigned long long>(hash.value));
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
    return 0;
  }
  const std::string one = HashWith(1, values[0]);
  CHECK_EQ(one.size(), 17u);
  for (int threads : {2, 5}) CHECK_EQ(HashWith(threads, values[0]), one);
  return check::Result();
}
