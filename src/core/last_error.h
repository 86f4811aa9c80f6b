// The text of the error that this thread's latest failed C function had.
// Who uses it: the C interfaces of kernels, op and mxnet.
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

}  // namespace syncbn
