// Texts of errors, and threads, for the native tests.
// Who uses it: tests in which functions fail, or several threads run.
#pragma once
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/error.h"

constexpr char kNoError[] = "nothing was thrown";

// The text of the error that `function` throws, or kNoError.
inline std::string ErrorOf(const std::function<void()>& function) {
  try {
    function();
  } catch (const syncbn::Error& error) {
    return error.what();
  }
  return kNoError;
}

inline void CheckHas(const std::string& text, const std::string& part) {
  CHECK(text.find(part) != std::string::npos, "\"", part, "\" in: ", text);
}

// function(0), ..., function(threads - 1), each in a thread of its own.
inline void Parallel(int threads, const std::function<void(int)>& function) {
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) running.emplace_back(function, i);
  for (auto& thread : running) thread.join();
}

inline void Sleep(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}
