// The layers that this process has frozen, so that it does not meet others in them.
// Who uses it: Python notes them; Protocol names the cause where another process waits for one.
#pragma once
#include <string>

namespace syncbn {

// `layer` is its name among processes. Thread-safe.
void NoteFrozen(const std::string& layer, bool is_frozen);

// "has frozen 'norm0': ..." for the first frozen layer that `text` names in quotes; empty for none.
std::string FrozenClause(const std::string& text);

}  // namespace syncbn
