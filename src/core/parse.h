// Locale-independent number parsing.
#pragma once
#include <cctype>
#include <locale>
#include <sstream>
#include <string>

namespace syncbn {

// Sets the number and returns true if it is the whole text and in the type's range: "-3", and for
// a double also "0.5" and "1e-05".
template <typename T>
bool ParseNumber(const std::string& text, T* number) {
  if (text.empty() || !(text[0] == '-' || std::isdigit(static_cast<unsigned char>(text[0])))) {
    return false;
  }
  std::istringstream stream(text);
  stream.imbue(std::locale::classic());
  stream >> *number;
  return !stream.fail() && stream.eof();
}

}  // namespace syncbn
