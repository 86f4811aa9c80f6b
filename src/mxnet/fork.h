// Keeps fork() safe while our operators are running.
// Who uses it: custom_op.cc arms it with the first operator; python_api.cc hands Python's hook on.
#pragma once

namespace syncbn {

// Makes every later fork() wait until MXNet is idle.
void ArmForkGuard();
void WaitBeforeFork();

}  // namespace syncbn
