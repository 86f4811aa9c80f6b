"""make_parallel under contrib.amp, which changes the operators of a whole process."""

import pytest
from support.helpers import run_python

amp = pytest.importorskip("mxnet.contrib.amp", reason="MXNet 2 has no contrib.amp")

PROGRAM = """
import gluon_syncbn
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.contrib import amp

amp.init(target_dtype="bfloat16")
net = gluon.nn.Dense(1, use_bias=False, in_units=2)
net.initialize(mx.init.One())
x = mx.nd.array([[1, 2], [3, 5], [2, 0.5]])  # bfloat16 holds all numbers exactly
try:
    net(x).wait_to_read()
except mx.MXNetError as error:
    print("MXNet by itself cannot compute a Dense in bfloat16:", error)
    raise SystemExit from None
net = gluon_syncbn.make_parallel(net, [mx.cpu(0), mx.cpu(1)], reset_ctx=True)
net.hybridize()
x.attach_grad()
with autograd.record():
    y = net(x)
    loss = gluon.loss.L1Loss()(y, mx.nd.zeros((3, 1)))
loss.backward()
assert y.dtype.names == ("bfloat16",), y.dtype
for array in mx.nd.amp_cast(y, dtype="float32"), x.grad, *net.weight.list_grad():
    print(array.asnumpy().tolist())
"""


@pytest.mark.skipif(
    not hasattr(amp.lists, "symbol_bf16"), reason="bfloat16 needs MXNet 1.7"
)
def test_bfloat16():
    result = run_python(PROGRAM)
    if result.stdout.startswith("MXNet by itself"):
        pytest.skip(result.stdout[:300])
    assert result.stdout.splitlines() == [
        "[[3.0], [8.0], [2.5]]",
        "[[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]",
        *["[[6.0, 7.5]]"] * 2,
    ], result.stderr
