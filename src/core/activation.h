// The function f of y = f(z), z = (x - mean) * scale + offset, that a layer may have built in.
// Who uses it: kernels, op, mxnet. It must not know where the data lives.
#pragma once

namespace syncbn {

enum class Function { kIdentity, kLeakyRelu, kElu };

struct Activation {
  Function function = Function::kIdentity;
  // For z <= 0 f(z) is slope * z (leaky ReLU; 0 makes it a ReLU) or slope * (exp(z) - 1) (ELU).
  double slope = 0;
};

}  // namespace syncbn
