// Huge pages for memory that is about to be written for the first time.
// Who uses it: op, for outputs. It must not know what is written.
//
// Outside static graphs MXNet takes every output fresh from the system and returns it after the
// step. Faulting 30 MB in by 4 KB pages takes several times as long as computing them, by 2 MB
// pages less than half of that.
#pragma once
#include <atomic>
#include <cstddef>

namespace syncbn {

// Faults memory in by huge pages where the system has free ones; changes no content. Does nothing
// for small memory, for pages that are present, or where the system has no huge pages.
void ExpectLargeWrite(void* data, size_t bytes);

// Decides whether to ask for huge pages. Some take tens of times as long as clearing them: where
// free memory is in pieces, the system moves other pages out of the way first, and a virtual
// machine may have to wait for its host's memory. After a slow one the policy pauses, so that they
// take no more than a twentieth of a thread's time.
class HugePagePolicy {
 public:
  // Times are in seconds, of any monotonic clock.
  bool Asks(double now) const { return now >= resumes_; }
  // A fault took `seconds` of processor time, until `now`.
  void Note(double seconds, double now) {
    if (seconds > kSlow) resumes_ = now + kPause * seconds;
  }

 private:
  static constexpr double kSlow = 1e-3;  // clearing 2 MB takes less than half of that
  static constexpr double kPause = 20;   // for each second

  std::atomic<double> resumes_{-1e300};
};

}  // namespace syncbn
