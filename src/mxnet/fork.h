// Keeps fork() safe while our operators are running.
#pragma once

namespace syncbn {

// Makes every later fork() wait until MXNet is idle.
void ArmForkGuard();
void WaitBeforeFork();

}  // namespace syncbn
