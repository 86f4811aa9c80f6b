// The channels whose x_hat backward cannot reconstruct from y: their x is kept, and they are
// computed apart, as a smaller tensor (outer, kept channels, inner).
// Who uses it: forward.cc calls Keep, backward.cc the others in their order.
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

  // `whole` is the pass over all channels as if it read x, whose t nobody reads. Replaces the
  // channels' sums.
  void BackwardSums(const SumsPass& whole);
  // Computes the channels' dx, with what is in `dx` where that is to be added to.
  void BackwardApply(const ApplyPass& whole);
  // Puts it into the whole dx, over what other kernels left there.
  void WriteTo(const ApplyPass& whole);

 private:
  // Lets a copy of the pass over all channels be one over the kept channels.
  void Narrow(BackwardInput* input);
  // The channels' part of a vector.
  std::vector<double> Select(const double* values) const;
  void* Memory(Backend::Place place, const Layout& whole);

  Backend* const backend_;
  std::vector<int64_t> channels_;
  DType dtype_ = DType::kFloat32;
  std::vector<double> mean_, scale_, offset_;  // of the latest Narrow
};

}  // namespace syncbn
