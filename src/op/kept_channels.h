// The channels that backward cannot recover from y: their x is kept, and they are computed apart.
// Who uses it: sync_batch_norm.cc, in forward Keep, in backward the others in their order.
#pragma once
#include <cstdint>
#include <vector>

#include "op/backend.h"

namespace syncbn {

class KeptChannels {
 public:
  explicit KeptChannels(Backend* backend) : backend_(backend) {}

  // Copies these channels of x until the next Keep, which frees the memory if it has none.
  void Keep(const Tensor& x, const Layout& layout, std::vector<int64_t> channels);

  bool empty() const { return channels_.empty(); }

  // Replaces the channels' sums, given for all channels; vectors are those of all channels, too.
  void BackwardSums(const Tensor& dy, const Layout& layout, const Recovery& from_x,
                    const double* mean, double* sum_dz, double* sum_dz_xmu);
  // Computes their dx, with what is in `dx` where that is to be added to.
  void BackwardApply(const Layout& layout, const Recovery& from_x, const double* mean,
                     const double* a, const double* b, const double* d, Request request,
                     const Tensor& dx);
  // Puts it into `dx`, over what other kernels left there.
  void WriteTo(const Tensor& dx, const Layout& layout);

 private:
  // The channels' part of a vector; null stays null.
  std::vector<double> Select(const double* values) const;
  Layout Compact(const Layout& layout) const;
  Tensor Memory(Backend::Place place, const Layout& layout);

  Backend* const backend_;
  std::vector<int64_t> channels_;
  DType dtype_ = DType::kFloat32;
};

}  // namespace syncbn
