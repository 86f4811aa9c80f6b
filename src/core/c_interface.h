// A macro that defines C functions for Python. CatchAll converts C++ exceptions to texts.
#pragma once
#include <exception>
#include <string>

// SYNCBN_EXPORT(int, name, double x) { ... } defines a function.
#define SYNCBN_EXPORT(result, name, ...) \
  extern "C" __attribute__((visibility("default"))) result name(__VA_ARGS__)

namespace syncbn {

// The error of the latest C function that failed on this thread.
inline thread_local std::string last_error;

// Calls body(). Returns 0, or -1 after an exception, whose text is then in last_error. Every
// exception must be a std::exception.
template <typename Body>
int CatchAll(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return -1;
  }
}

// Returns body(), or `failed` after an exception.
template <typename Value, typename Body>
Value CatchAll(Value failed, const Body& body) {
  CatchAll([&] { failed = body(); });
  return failed;
}

}  // namespace syncbn
