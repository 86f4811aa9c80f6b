// Makes a GPU the thread's current one for a while.
#pragma once

namespace syncbn::cuda {

// Afterwards the thread has the context that it had before, or none. Through the driver, because
// cudaSetDevice would make a context on a device 0 that the thread has never used.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal);
  ~CurrentDevice();
  // After a call of other code, which may have made another device the current one.
  void Renew() const;
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  CurrentDevice(int ordinal, void* before) : ordinal_(ordinal), context_before_(before) {}

  const int ordinal_;
  void* const context_before_;
};

}  // namespace syncbn::cuda
