// Keeps fork() safe while operators of ours are in flight.
// Who uses it: python_api.cc arms it once, and hands Python's hook on; custom_op.cc tells it that
// there are operators.
#pragma once

namespace syncbn {

// Makes every later fork() wait until MXNet is idle, once an operator of ours was made.
void ArmForkGuard();
void WaitBeforeFork();
void NoteOperatorMade();
bool HasOperators();

}  // namespace syncbn
