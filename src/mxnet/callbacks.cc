// Errors into MXNet, one after the other.
#include "mxnet/callbacks.h"

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "mxnet/mxnet_api.h"

namespace syncbn {
namespace {

// MXNet's custom operators share one slot for exceptions, without a lock (custom-inl.h,
// `exception_`): a thrown exception is put there, and whichever operator completes next takes it.
// Two completions at once free the same object twice, and a healthy one takes what was meant for
// another. Its lock is out of reach, so at most one exception may be on its way, and nobody else
// may complete meanwhile.
class Delivery {
 public:
  // For a callback that ends well.
  void Pass() {
    Lock lock(mutex_);
    AwaitNoneLocked(&lock);
    last_pass_ = Clock::now();
  }

  // Before a throw. The exception is on its way until the last copy of the result is gone: MXNet
  // destroys the exception object when the operator has completed.
  std::shared_ptr<void> Begin() {
    Lock lock(mutex_);
    AwaitNoneLocked(&lock);
    ++on_their_way_;
    const auto quiet = last_pass_ + kCompletion;
    lock.unlock();
    std::this_thread::sleep_until(quiet);
    return std::shared_ptr<void>(this, [](void* self) { static_cast<Delivery*>(self)->End(); });
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;

  // The end of a healthy operator cannot be observed; it is a matter of microseconds.
  static constexpr std::chrono::milliseconds kCompletion{5};
  // An exception that MXNet never destroys must not stop the process.
  static constexpr std::chrono::seconds kLimit{10};

  void AwaitNoneLocked(Lock* lock) {
    changed_.wait_for(*lock, kLimit, [&] { return on_their_way_ == 0; });
  }

  void End() {
    Lock lock(mutex_);
    --on_their_way_;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  int on_their_way_ = 0;
  Clock::time_point last_pass_;
};

constexpr std::chrono::milliseconds Delivery::kCompletion;
constexpr std::chrono::seconds Delivery::kLimit;

Delivery& TheDelivery() {
  static Delivery* delivery = new Delivery;  // operators may outlive static destructors
  return *delivery;
}

struct DeliveredError : public dmlc::Error {
  explicit DeliveredError(const std::string& text)
      : dmlc::Error(text), on_its_way(TheDelivery().Begin()) {}
  std::shared_ptr<void> on_its_way;
};

}  // namespace

void PassToMxnet() { TheDelivery().Pass(); }

void ThrowToMxnet(const std::string& text) { throw DeliveredError(text); }

}  // namespace syncbn
