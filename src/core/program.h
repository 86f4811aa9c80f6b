// Tells at which lines the program stands; the errors of waits show them.
#pragma once
#include <string>

namespace syncbn {

// Lines that begin with a line feed, as "\nThe program stands at train.py:41: ..."; empty if
// nobody knows, or the process forks. To be called without a mutex that the program's threads take.
std::string WhereProgramStands();

// Between these two the process forks.
void BeginFork();
void EndFork();

// `locate` answers each call, in its thread, with TellWhere; null for nobody.
void SetLocator(void (*locate)());
void TellWhere(const char* text);

}  // namespace syncbn
