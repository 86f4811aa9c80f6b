// Finds the lines that the Python program is executing, for the errors of timeouts.
#pragma once
#include <string>

namespace syncbn {

// Returns lines like "\nThe program stands at train.py:41: ...", or an empty text if no locator is
// set, or if the process forks or has no more threads. The caller must not hold a mutex for which
// the program may wait.
std::string WhereProgramStands();

// Must be called before and after each fork.
void BeginFork();
void EndFork();

// Sets the locator, which must pass the lines to ReportWhere. Null removes it.
void SetLocator(void (*locate)());
void ReportWhere(const char* text);

}  // namespace syncbn
