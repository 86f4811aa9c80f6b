// One text for each thread.
#include "core/last_error.h"

namespace syncbn {

std::string& LastError() {
  thread_local std::string text;
  return text;
}

}  // namespace syncbn
