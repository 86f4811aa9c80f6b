// Huge pages for memory that is about to be written for the first time.
// Who uses it: op, for outputs. It must not know what is written.
//
// Outside static graphs MXNet takes every output fresh from the system and gives it back after the
// step. Faulting 30 MB in by 4 KB pages takes several times as long as computing them, by 2 MB
// pages less than half of that.
#pragma once
#include <atomic>
#include <cstddef>

namespace syncbn {

// Faults memory in by huge pages where the system has them at hand; changes no content. Does
// nothing for small memory, for what is there already, or where the system has no huge pages.
void ExpectLargeWrite(void* data, size_t bytes);

// Decides whether to ask for huge pages. Some take tens of times as long as clearing them: the
// system moves other pages out of the way in the middle of the fault where free memory is in
// pieces, and a virtual machine's host brings the memory first. After such a one there is a pause,
// so that they take no more than a twentieth of a thread's time.
class HugePagePolicy {
 public:
  // Times are in seconds, of any clock that goes on.
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
