// Errors into MXNet, one after the other.
#include "mxnet/callbacks.h"

#include <chrono>
#include <mutex>
#include <thread>

#include "mxnet/mxnet_api.h"

namespace syncbn {

// MXNet's custom operator threads keep an exception in one std::shared_ptr that they share without
// a lock (custom-inl.h, `exception_`), and all devices of a failed round would throw at the same
// moment: two assignments at once free the same object twice. Its lock is out of reach, so the
// throws are spaced out instead; this costs milliseconds, only on the way to an error.
void ThrowToMxnet(const std::string& text) {
  static std::mutex mutex;
  static std::chrono::steady_clock::time_point next;
  {
    std::lock_guard<std::mutex> lock(mutex);
    std::this_thread::sleep_until(next);
    next = std::chrono::steady_clock::now() + std::chrono::milliseconds(5);
  }
  throw dmlc::Error(text);
}

}  // namespace syncbn
