// How a C++ exception leaves a callback that MXNet calls.
// Who uses it: custom_op.cc wraps every callback in it.
#pragma once
#include <exception>
#include <string>

#include "mxnet/mxnet_api.h"

namespace syncbn {

// Runs the body of a callback of the front end, on the thread that called MXNet; returns MXNet's 1
// for success. Any exception becomes a dmlc::Error, which reaches the user as an MXNetError with
// the same text.
template <typename Body>
int Callback(const Body& body) {
  std::string text;
  try {
    body();
    return 1;
  } catch (const std::exception& error) {
    text = error.what();
  }
  throw dmlc::Error(text);
}

// Lets the operator to whose call `array` belongs complete with an MXNetError of this text.
void FailOperator(NDArrayHandle array, const std::string& text);

// The same for what MXNet runs later, on its threads for custom operators. `array` is the first
// that it has given to the call.
template <typename Body>
int OperatorCallback(NDArrayHandle array, const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    FailOperator(array, error.what());
  }
  return 1;
}

}  // namespace syncbn
