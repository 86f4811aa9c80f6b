// Tests that two passes over one block of channels after another have the bits of two whole passes,
// and that `between` is called once for every channel.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/cpu/batch_norm_cpu.h"
#include "same_values.h"

namespace cpu = syncbn::cpu;
using syncbn::Activation;
using syncbn::BackwardInput;
using syncbn::DType;
using syncbn::Function;
using syncbn::Layout;
using syncbn::Request;
using test::Tensor;

namespace {

constexpr double kEpsilon = 1e-5;

// Three tensors of random values.
struct Data {
  DType dtype;
  Layout layout;
  Tensor first, second, third;

  Data(DType of, const Layout& like)
      : dtype(of),
        layout(like),
        first(test::Random(of, like.Size(), 0, 1)),
        second(test::Random(of, like.Size(), 0, 2)),
        third(test::Random(of, like.Size(), 0, 3)) {}
};

struct Case {
  bool by_block;
  Request request;
  bool in_place;
};

std::vector<double> Workspace(const Layout& layout) {
  return std::vector<double>(static_cast<size_t>(cpu::WorkspaceBytes(layout)) / sizeof(double));
}

// Values that were right before must not pass for new ones.
void Spoil(std::vector<double>* values) { std::fill(values->begin(), values->end(), NAN); }

// Counts the channels that `between` is called for, and the calls.
struct Count {
  std::vector<std::atomic<int>> of;
  std::atomic<int> calls{0};

  explicit Count(int64_t channels) : of(static_cast<size_t>(channels)) {}
  void Add(int64_t begin, int64_t end) {
    ++calls;
    for (int64_t c = begin; c < end; ++c) ++of[static_cast<size_t>(c)];
  }
  void Check(const Case& c, const std::string& label) const {
    CHECK_EQ(calls > 1, c.by_block, label);
    for (const std::atomic<int>& count : of) CHECK_EQ(count.load(), 1, label);
  }
};

void TestForward(const Data& data, const Case& c, const std::string& label) {
  const size_t channels = static_cast<size_t>(data.layout.channels);
  std::vector<double> workspace = Workspace(data.layout);
  std::vector<double> mean(channels), m2(channels, 5), scale(channels), offset(channels, 0.5);
  const Activation activation{Function::kElu, 0.7};
  const auto set_scale = [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) scale[k] = 1 / (m2[k] + kEpsilon);
  };
  Tensor x = data.first, x_whole = x, y = data.second, y_whole = y;
  Tensor& out_whole = c.in_place ? x_whole : y_whole;
  const auto moments = [&](Tensor& from) {
    return syncbn::MomentsPass{data.dtype, data.layout, from.data(), mean.data(), m2.data()};
  };
  const auto normalize = [&](Tensor& from, Tensor& to) {
    return syncbn::NormalizePass{data.dtype,   data.layout,   from.data(), mean.data(),
                                 scale.data(), offset.data(), activation,  c.request,
                                 to.data()};
  };
  cpu::LocalMoments(moments(x_whole), workspace.data());
  set_scale(0, data.layout.channels);
  cpu::Normalize(normalize(x_whole, out_whole));
  const std::vector<double> mean_whole = mean, m2_whole = m2;

  Count count(data.layout.channels);
  for (auto* stale : {&workspace, &mean, &m2, &scale}) Spoil(stale);
  Tensor& out = c.in_place ? x : y;
  cpu::MomentsAndNormalize(
      moments(x),
      [&](int64_t begin, int64_t end) {
        count.Add(begin, end);
        set_scale(begin, end);
      },
      normalize(x, out), workspace.data());
  count.Check(c, label);
  CHECK(mean == mean_whole && m2 == m2_whole, label);
  test::CheckSame(out, out_whole, label);
}

void TestBackward(const Data& data, const Case& c, const std::string& label) {
  const size_t channels = static_cast<size_t>(data.layout.channels);
  std::vector<double> workspace = Workspace(data.layout);
  std::vector<double> dz(channels), dz_u(channels), a(channels, 2), b(channels), d(channels);
  const std::vector<double> mean(channels, 1), scale(channels, 0.5), offset(channels, 0.1);
  const auto set_terms = [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      b[k] = dz_u[k] / (1 + static_cast<double>(data.layout.PerChannel()));
      d[k] = dz[k] / (1 + static_cast<double>(data.layout.PerChannel()));
    }
  };
  Tensor x = data.first, dy = data.second, dy_whole = dy, dx = data.third, dx_whole = dx;
  Tensor& out_whole = c.in_place ? dy_whole : dx_whole;
  const auto input = [&](Tensor& of_dy) {
    return BackwardInput{data.dtype,   data.layout, x.data(),
                         of_dy.data(), {Function::kLeakyRelu, 0.01}, false,
                         mean.data(),  scale.data(), offset.data()};
  };
  const auto sums = [&](Tensor& of_dy) {
    return syncbn::SumsPass{input(of_dy), dz.data(), dz_u.data()};
  };
  const auto apply = [&](Tensor& of_dy, Tensor& to) {
    return syncbn::ApplyPass{input(of_dy), a.data(), b.data(), d.data(), c.request, to.data()};
  };
  cpu::BackwardSums(sums(dy_whole), workspace.data());
  set_terms(0, data.layout.channels);
  cpu::BackwardApply(apply(dy_whole, out_whole));
  const std::vector<double> dz_whole = dz, dz_u_whole = dz_u;

  Count count(data.layout.channels);
  for (auto* stale : {&workspace, &dz, &dz_u, &b, &d}) Spoil(stale);
  Tensor& out = c.in_place ? dy : dx;
  cpu::SumsAndApply(
      sums(dy),
      [&](int64_t begin, int64_t end) {
        count.Add(begin, end);
        set_terms(begin, end);
      },
      apply(dy, out), workspace.data());
  count.Check(c, label);
  CHECK(dz == dz_whole && dz_u == dz_u_whole, label);
  test::CheckSame(out, out_whole, label);
}

// `by_block` says that two threads gain by going from block to block.
void TestLayout(const Layout& layout, bool by_block, const std::vector<DType>& dtypes) {
  for (DType dtype : dtypes) {
    const Data data(dtype, layout);
    // Results in place of an input overwrite it, so they are not added.
    for (const Case& c : {Case{by_block, Request::kWrite, false},
                          Case{by_block, Request::kWrite, true},
                          Case{by_block, Request::kAdd, false}}) {
      const std::string label =
          syncbn::Concat(syncbn::Name(dtype), " ", test::Describe(layout),
                         c.request == Request::kAdd ? " add" : "", c.in_place ? " in place" : "");
      TestForward(data, c, label + " forward");
      TestBackward(data, c, label + " backward");
    }
  }
}

}  // namespace

int main() {
  setenv("OMP_NUM_THREADS", "2", 1);  // read at the first use of the kernels
  const std::vector<DType> all(std::begin(test::kDTypes), std::end(test::kDTypes));
  TestLayout({8, 64, 700}, true, all);
  TestLayout({3, 10, 5000}, true, {DType::kFloat32});
  TestLayout({60, 130, 130}, true, {DType::kFloat32});  // several tiles of a channel
  TestLayout({4, 300, 49}, true, all);                  // small planes
  TestLayout({2, 3000, 9}, true, {DType::kFloat32});
  TestLayout({1, 5, 40000}, true, {DType::kFloat32});
  TestLayout({4, 64, 5000}, true, {DType::kFloat64});  // so large that stores are streamed
  TestLayout({2, 8, 64}, false, all);
  TestLayout({700, 64, 1}, false, all);  // channels last: one block
  TestLayout({2, 3, 20000}, false, {DType::kFloat32});  // three blocks: one thread would wait
  TestLayout({3, 4, 100000}, false, {DType::kFloat64});  // blocks that no cache holds
  TestLayout({0, 4, 9}, false, all);
  TestLayout({3, 4, 0}, false, all);
  return check::Result();
}
