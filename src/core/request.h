// The ways to write an output.
// Who uses it: kernels, op, mxnet.
#pragma once

namespace syncbn {

// The output stays as it is, is overwritten, or is added to; numbers of the tests' C interface.
enum class Request : int { kNull = 0, kWrite = 1, kAdd = 2 };

}  // namespace syncbn
