// The one exception type of the library, and how its text is put together.
// Who uses it: every folder but kernels. Only mxnet/ turns it into MXNet's own error.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace syncbn {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
std::string Concat(const Parts&... parts) {
  std::ostringstream text;
  using Expand = int[];
  (void)Expand{0, ((text << parts), 0)...};
  return text.str();
}

}  // namespace syncbn
