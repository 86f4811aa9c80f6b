// The parts of every C interface: exported functions, and errors as texts, because no exception may
// pass through one.
#pragma once
#include <exception>
#include <string>

#define SYNCBN_EXPORT extern "C" __attribute__((visibility("default")))

namespace syncbn {

// The text of the error that this thread's latest failed C function had.
inline std::string& LastError() {
  thread_local std::string text;
  return text;
}

// Runs body(); returns 0, or -1 with the exception's text in LastError.
template <typename Body>
int CatchAll(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    LastError() = error.what();
    return -1;
  }
}

// The value of body(), or `failed` with the exception's text in LastError.
template <typename Value, typename Body>
Value CatchAll(Value failed, const Body& body) {
  CatchAll([&] { failed = body(); });
  return failed;
}

}  // namespace syncbn
