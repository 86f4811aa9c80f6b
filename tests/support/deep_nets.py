"""A deep, branched net, and the values that it trains to.

GLUON_SYNCBN_REPEAT=100 repeats each comparison so often.
"""

import functools
import os

import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock, nn

import gluon_syncbn
from support import reference
from support.helpers import make_batches, plain_net, train

REPEAT = int(os.environ.get("GLUON_SYNCBN_REPEAT", 3))
SHAPE = (8, 3, 20, 20)
STEPS = 4


class Unit(HybridBlock):
    """Two branches and a shortcut; Dropout works beside them, times 0."""

    def __init__(self, norm, channels):
        super().__init__()
        with self.name_scope():
            self.left = nn.HybridSequential()
            self.left.add(nn.Conv2D(channels, 3, padding=1, use_bias=False), norm())
            self.right = nn.HybridSequential()
            self.right.add(
                nn.Conv2D(channels, 1, use_bias=False),
                norm(),
                nn.Activation("relu"),
                nn.Conv2D(channels, 3, padding=2, dilation=2, use_bias=False),
                norm(),
            )
            self.dropout = nn.Dropout(0.5)

    def hybrid_forward(self, F, x):
        return F.relu(self.left(x) + self.right(x) + x + 0 * self.dropout(x))


def deep_net(norm, container=nn.HybridSequential):
    net = container()
    with net.name_scope():
        net.add(nn.Conv2D(16, 3, padding=1, use_bias=False), norm())
        net.add(nn.Activation("relu"))
        for _ in range(3):
            net.add(Unit(norm, 16))
        net.add(nn.MaxPool2D(2), nn.Conv2D(32, 3, padding=1, use_bias=False), norm())
        for _ in range(2):
            net.add(Unit(norm, 32))
        net.add(nn.Conv2D(4, 1), norm())
    return net


def values_of_one_context(dtype):
    plain = plain_net(deep_net, SHAPE, "float32")
    plain.cast(dtype)
    batches = make_batches((8, 4, 10, 10), SHAPE, STEPS, "float32")
    batches = [tuple(v.astype(dtype) for v in pair) for pair in batches]
    with gluon_syncbn.Devices(mx.cpu()) as one:
        return train(plain, one, batches, [8], learning_rate=0.01)


@functools.lru_cache(maxsize=None)
def truth():
    """Float64 values of nn.BatchNorm, and by how much its float32 values differ."""
    right = values_of_one_context("float64")
    values = values_of_one_context("float32")
    return right, [abs(a - b).max() for a, b in zip(values, right)]


def assert_true(values, repeat):
    """Compares what a float32 net has computed in so many repetitions."""
    right, errors = truth()
    assert len(values) == len(right) > 60
    for index, (value, expected, error) in enumerate(zip(values, right, errors)):
        scale = max(1.0, abs(expected).max())
        rtol, atol = reference.tolerance("float32", expected.size, scale=scale)
        # Steps amplify rounding: by how much, MXNet's own float32 run measures.
        atol += 10 * error
        message = f"array {index}, repeat {repeat}"
        np.testing.assert_allclose(value, expected, rtol, atol, err_msg=message)
