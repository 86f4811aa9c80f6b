// The exception types of the library, and functions that build their texts. Only mxnet/ converts
// them to MXNet's own error.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace syncbn {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An error of one device; the operator adds the names of the layer and the device.
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
