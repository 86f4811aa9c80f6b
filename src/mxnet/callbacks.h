// Turns C++ exceptions in callbacks into errors of MXNet.
#pragma once
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "mxnet/mxnet_api.h"
#include "mxnet/ndarray.h"

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

// Lets the operator to whose call `array` belongs complete with an MXNetError of this text. Waits
// for the operators that have failed before.
void FailOperator(NDArray array, const std::string& text);

// Must be called once, before the first operator is created.
void ReserveErrors();

// As Callback, for what MXNet runs later, on its threads for custom operators. `handles` are the
// call's arrays, and the body gets them.
template <typename Body>
int OperatorCallback(int size, void** handles, const Body& body) {
  std::vector<NDArray> arrays(handles, handles + size);
  try {
    body(arrays);
  } catch (const std::exception& error) {
    FailOperator(std::move(arrays[0]), error.what());
  }
  return 1;
}

}  // namespace syncbn
