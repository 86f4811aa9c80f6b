// Variables of the process's environment. native_op.cc includes this header, so it has no string.
#pragma once
#include <cstdlib>
#include <cstring>

namespace syncbn {

inline bool IsSet(const char* variable, const char* value) {
  const char* const setting = std::getenv(variable);
  return setting != nullptr && std::strcmp(setting, value) == 0;
}

}  // namespace syncbn
