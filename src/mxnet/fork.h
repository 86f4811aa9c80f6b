// Keeps fork() safe while our operators are running.
// Who uses it: python_api.cc arms it once, and hands Python's hook on; custom_op.cc tells it of
// the first operator.
#pragma once
#include <atomic>

namespace syncbn {

// True once one of our operators was created.
inline std::atomic<bool> has_operators{false};

// Makes every later fork() wait until MXNet is idle, if it has our operators.
void ArmForkGuard();
void WaitBeforeFork();

}  // namespace syncbn
