// The lines that the Python program is executing; errors of waits show them.
#pragma once
#include <string>

namespace syncbn {

// Returns lines that begin with a line feed, like "\nThe program stands at train.py:41: ...", or an
// empty text if no locator is set or the process forks. The caller must not hold a mutex that the
// program's threads lock.
std::string WhereProgramStands();

// The process forks between these two calls.
void BeginFork();
void EndFork();

// `locate` reports the lines with ReportWhere, on the calling thread. Pass null to disable.
void SetLocator(void (*locate)());
void ReportWhere(const char* text);

}  // namespace syncbn
