// Texts of errors, and sleep, for the native tests of src/collective.
// Who uses it: test_collective.cc and test_communicator.cc.
#pragma once
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "check.h"
#include "core/error.h"

// The text that `function` throws, or "nothing was thrown".
inline std::string ErrorOf(const std::function<void()>& function) {
  try {
    function();
  } catch (const syncbn::Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

inline void CheckHas(const std::string& text, const std::string& part) {
  CHECK(text.find(part) != std::string::npos, "\"", part, "\" in: ", text);
}

inline void Sleep(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}
