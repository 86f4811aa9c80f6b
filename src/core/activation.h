// The function f of y = f(z), z = (x - mean) * scale + offset, that a layer may have built in.
// Who uses it: kernels, op, mxnet. It must not know where the data lives.
#pragma once

namespace syncbn {

// Numbers of the kernels' C interface.
enum class Function : int { kIdentity = 0, kLeakyRelu = 1, kElu = 2 };

struct Activation {
  Function function = Function::kIdentity;
  // For z <= 0 f(z) is slope * z (leaky ReLU; 0 makes it a ReLU) or slope * (exp(z) - 1) (ELU).
  double slope = 0;
};

// What backward reads of the forward pass, and how it gets from there to z and through f.
struct Recovery {
  Activation activation;
  // False: the tensor is x, and `scale` and `offset` lead to z (null where f is the identity).
  // True: the tensor is y, and the channels' "mean" is the offset: u is (x - mean) * scale then. The
  // slope is positive, and f is no ELU.
  bool from_output = false;
  const double* scale = nullptr;
  const double* offset = nullptr;
};

}  // namespace syncbn
