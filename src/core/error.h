// The exception types of the library, and how their texts are put together. Only mxnet/ turns them
// into MXNet's own error.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace syncbn {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A device's runtime has refused a call. Kernels know no layer: op adds its name.
struct DeviceError : Error {
  using Error::Error;
};

template <typename... Parts>
std::string Concat(const Parts&... parts) {
  std::ostringstream text;
  using Expand = int[];
  (void)Expand{0, ((text << parts), 0)...};
  return text.str();
}

inline std::string Join(const std::vector<std::string>& parts, const char* separator = ", ") {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : separator) + part;
  return text;
}

}  // namespace syncbn
