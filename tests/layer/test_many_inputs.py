"""Nets with several inputs, as detection nets have them, in every graph mode.

The guard of a traced layer asks for the shape of what it gets (`graphs.py`),
which depends on some of the net's inputs only.
"""

from functools import partial

from gluon_syncbn import make_parallel

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support.blocks import Function
from support.helpers import (
    MODES,
    assert_all_near,
    cpus,
    plain_net,
    set_mode,
    summed_grad,
    twin,
)
from support.nd import nd

SHAPE, CHANNELS = (6, 3, 8, 7), 4


class Merged(Function):
    """Takes any number of inputs; the first goes through the layers."""

    def __init__(self, norm, merge):
        super().__init__()
        self.merge = merge
        self.conv = nn.Conv2D(CHANNELS, 3, padding=1, use_bias=False, in_channels=3)
        self.bn = norm(in_channels=CHANNELS)
        self.late = norm(in_channels=CHANNELS)

    def compute(self, F, x, *others):
        return self.merge(self, F, self.bn(self.conv(x)), *others)


def added(net, F, x, *others):
    """The sum of a layer's output and the inputs is the output of the graph."""
    for other in others:
        x = x + other
    return x


# The others avoid `+`: where inputs have no gradient, MXNet's own backward of it fails
# in such graphs or is wrong with static_alloc, with nn.BatchNorm too.


def nested(net, F, x, pair, absent, deeper):
    (first, (second,)), (third,) = pair, deeper
    assert absent is None
    late = net.late(F.relu(F.broadcast_add(x, first)))
    return F.broadcast_add(late, F.broadcast_mul(second, third))


def several_outputs(net, F, x, first, second):
    return x * 1, [net.late(first), F.broadcast_add(F.relu(x), second)]


# Per name how inputs are merged, their number, and the arguments made of their list.
CALLS = {
    "added": (added, 2, tuple),
    "nested": (nested, 4, lambda a: (a[0], [a[1], [a[2]]], None, [a[3]])),
    "several_outputs": (several_outputs, 3, tuple),
}
CASES = [
    (call, attach, "float64") for call in CALLS for attach in ("data", "variables")
]
# The guard of a static_shape graph depends on the dtype.
CASES += [("added", "data", "float32")]


def random_inputs(count, dtype, attach):
    """`count` inputs: one of 3 channels, the others like the layers' output."""
    rng = np.random.default_rng(0)
    shapes = [SHAPE] + [(SHAPE[0], CHANNELS, *SHAPE[2:])] * (count - 1)
    values = (rng.normal(1, 2, shape).astype("float32") for shape in shapes)
    inputs = [nd.array(array, dtype=dtype) for array in values]
    for array in inputs if attach == "variables" else []:
        array.attach_grad()
    return inputs


def flat(outputs):
    if isinstance(outputs, mx.nd.NDArray):
        return [outputs]
    return [array for output in outputs for array in flat(output)]


def two_steps(net, inputs, shaped):
    """Outputs and all gradients of the second of two steps."""
    for _ in range(2):
        with autograd.record():
            outputs = flat(net(*shaped(inputs)))
            total = sum((y * y).sum() for y in outputs)
        total.backward()
    parameters = [p for p in net.collect_params().values() if p.grad_req != "null"]
    arrays = outputs + [x.grad for x in inputs if x.grad is not None]
    return [y.asnumpy() for y in arrays] + [summed_grad(p) for p in parameters]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call, attach, dtype", CASES)
@pytest.mark.filterwarnings("ignore:Parameter .* is not used")
def test_trains_like_batch_norm(call, attach, dtype, mode):
    merge, inputs, shaped = CALLS[call]
    contexts = cpus(2)
    make_net = partial(Merged, merge=merge)
    plain = plain_net(make_net, None, dtype)
    data = random_inputs(inputs, dtype, attach)
    plain(*shaped(data))
    net = make_parallel(twin(plain, make_net, contexts, dtype), contexts)
    results = two_steps(set_mode(net, mode), data, shaped)
    plain.cast("float64")
    expected = two_steps(plain, random_inputs(inputs, "float64", attach), shaped)
    assert len(results) > 5
    # Squares of sums of inputs are added up.
    assert_all_near(results, expected, dtype, count=np.prod(SHAPE))
