// The ways to write an output.
// Who uses it: kernels, op, mxnet.
#pragma once

namespace syncbn {

// The output stays as it is, is overwritten, or is added to.
enum class Request { kNull, kWrite, kAdd };

}  // namespace syncbn
