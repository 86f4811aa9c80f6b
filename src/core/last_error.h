// The text of the error that this thread's latest failed C function had.
// Who uses it: every C interface, because no exception may pass through one.
#pragma once
#include <exception>
#include <string>

namespace syncbn {

std::string& LastError();

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
