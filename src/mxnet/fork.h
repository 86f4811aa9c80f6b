// Keeps fork() safe while our operators are running.
// Who uses it: python_api.cc arms it once, and hands Python's hook on; custom_op.cc tells it of
// the first operator.
#pragma once

namespace syncbn {

// Makes every later fork() wait until MXNet is idle, once one of our operators was created.
void ArmForkGuard();
void WaitBeforeFork();
void NoteOperatorMade();
bool HasOperators();

}  // namespace syncbn
