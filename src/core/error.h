// The exception types of the library, and functions that build texts.
#pragma once
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace syncbn {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An error on one device. The operator adds the names of the layer and the device, and raises it on
// all devices as an Error.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
std::string Concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

inline std::string Join(const std::vector<std::string>& parts, const char* separator = ", ") {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : separator) + part;
  return text;
}

template <typename Number>
std::string JoinNumbers(const std::vector<Number>& numbers) {
  std::vector<std::string> texts;
  for (const Number number : numbers) texts.push_back(std::to_string(number));
  return Join(texts);
}

// "(8, 64, 60, 60)"
inline std::string ShapeText(const std::vector<int64_t>& shape) {
  return "(" + JoinNumbers(shape) + ")";
}

}  // namespace syncbn
