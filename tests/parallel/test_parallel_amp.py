"""make_parallel under contrib.amp, which changes the operators of a whole process."""

import pytest
from support.helpers import run_python

amp = pytest.importorskip("mxnet.contrib.amp", reason="MXNet 2 has another one")

# Small multiples of 0.5, which bfloat16 holds exactly. So results must be equal.
PROGRAM = """
import gluon_syncbn
import mxnet as mx
import numpy as np
from support.helpers import summed_grad
from mxnet import autograd
from mxnet.contrib import amp
from mxnet.gluon import loss, nn

amp.init(target_dtype="bfloat16")
contexts = [mx.cpu(0), mx.cpu(1)]
rng = np.random.default_rng(0)
x = mx.nd.array(rng.integers(-1, 2, (5, 8)))
label = mx.nd.array(rng.integers(-1, 2, (5, 2)) + 0.5)
weight = rng.integers(-1, 2, (2, 8))

def dense():
    return nn.Dense(2, in_units=8, weight_initializer=mx.init.Constant(weight))

def numbers(array):
    return mx.nd.amp_cast(array, dtype="float32").asnumpy()

def results(is_parallel):
    net = dense()
    if is_parallel:
        gluon_syncbn.make_parallel(net, contexts)
    net.initialize()
    net.hybridize()
    x.attach_grad()
    with autograd.record():
        y = net(x)
        total = loss.L1Loss()(y, label)
    total.backward()
    assert y.dtype.names == ("bfloat16",), y.dtype
    gradients = [summed_grad(p) for p in net.collect_params().values()]
    return [numbers(y), total.asnumpy(), x.grad.asnumpy(), *gradients]

try:
    right = results(False)
except mx.MXNetError as error:
    print("MXNet by itself cannot do that here:", error)
    raise SystemExit from None
for result, expected in zip(results(True), right):
    assert abs(expected).max() > 0 and (result == expected).all()
print("equal")
"""


@pytest.mark.skipif(
    not hasattr(amp.lists, "symbol_bf16"), reason="MXNet 1.7 brought bfloat16"
)
def test_bfloat16():
    result = run_python(PROGRAM)
    if result.stdout.startswith("MXNet by itself"):
        pytest.skip(result.stdout[:300])
    assert result.stdout == "equal\n", result.stderr
