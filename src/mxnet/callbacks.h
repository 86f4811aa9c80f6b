// How a C++ exception leaves a callback that MXNet calls.
// Who uses it: custom_op.cc wraps every callback in it.
#pragma once
#include <exception>
#include <string>

namespace syncbn {

// Before a callback returns well: lets an exception of another one arrive first, see callbacks.cc.
void PassToMxnet();

// Throws dmlc::Error with this text, see callbacks.cc.
[[noreturn]] void ThrowToMxnet(const std::string& text);

// Runs a callback's body; returns MXNet's 1 for success. Any exception becomes a dmlc::Error,
// which reaches the user as an MXNetError with the same text.
template <typename Body>
int Callback(const Body& body) {
  std::string text;
  try {
    body();
    PassToMxnet();
    return 1;
  } catch (const std::exception& error) {
    text = error.what();
  }
  ThrowToMxnet(text);
}

}  // namespace syncbn
