// Numbers out of text, in one form only, whatever the program's locale.
#pragma once
#include <cctype>
#include <locale>
#include <sstream>
#include <string>

namespace syncbn {

// The number that is the whole text: "-3", and for a double "0.5" and "1e-05" too. False if it is
// none, or beyond the type's range.
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
