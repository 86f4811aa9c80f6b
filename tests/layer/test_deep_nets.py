"""Deep, branched float32 nets train on several CPU contexts, again and again.

They show early frees of oneDNN's blocks, wrong exchanges and waits for CPU resources.
"""

import functools

import gluon_syncbn

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import Trainer, nn
from support import reference
from support.blocks import Function, by_gluon
from support.helpers import (
    MODES,
    assert_all_near,
    cpus,
    differentiate,
    put,
    repetitions,
    set_mode,
    split_rows,
    summed_grad,
    train_step,
    values,
)
from support.nd import nd

REPEAT = repetitions()
SHAPE = (8, 3, 20, 20)
STEPS, MOMENTUM = 4, 0.875  # float32 has this momentum exactly
# MXNet 2 draws numbers with which rounding would change the sign of a ReLU's input.
ACTIVATION = by_gluon("relu", "softrelu")


class Unit(Function):
    """Two branches, a shortcut, and a Dropout whose output is multiplied by 0."""

    def __init__(self, norm, channels):
        super().__init__()
        self.left = nn.HybridSequential()
        self.left.add(nn.Conv2D(channels, 3, padding=1, use_bias=False), norm())
        self.right = nn.HybridSequential()
        self.right.add(
            nn.Conv2D(channels, 1, use_bias=False),
            norm(),
            nn.Activation(ACTIVATION),
            nn.Conv2D(channels, 3, padding=2, dilation=2, use_bias=False),
            norm(),
        )
        self.dropout = nn.Dropout(0.5)

    def compute(self, F, x):
        total = self.left(x) + self.right(x) + x + 0 * self.dropout(x)
        return F.Activation(total, act_type=ACTIVATION)


def deep_net(norm):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, padding=1, use_bias=False), norm())
    net.add(nn.Activation(ACTIVATION))
    for _ in range(3):
        net.add(Unit(norm, 16))
    net.add(nn.MaxPool2D(2), nn.Conv2D(32, 3, padding=1, use_bias=False), norm())
    for _ in range(2):
        net.add(Unit(norm, 32))
    net.add(nn.Conv2D(4, 1), norm())
    return net


def train(norm, rows, mode="imperative", dtype="float32"):
    """Train on shards of `rows`; return outputs, gradients and parameters."""
    net = deep_net(functools.partial(norm, momentum=MOMENTUM))
    contexts = cpus(len(rows))
    mx.random.seed(1)  # equal initial values in all calls
    net.initialize(mx.init.Xavier(), ctx=contexts)
    net(nd.ones(SHAPE))  # a cast needs parameters that have values
    set_mode(net, mode).cast(dtype)
    settings = {"learning_rate": 0.01, "momentum": 0.9}
    trainer = Trainer(net.collect_params(), "sgd", settings)
    rng, found, devices = np.random.default_rng(0), [], gluon_syncbn.Devices(contexts)
    for _ in range(STEPS):
        batch = rng.normal(1, 2, SHAPE), rng.normal(size=(8, 4, 10, 10))
        shards, dys = (
            put(split_rows(v.astype("float32"), rows), contexts, dtype) for v in batch
        )
        ys, dxs = train_step(devices, net, shards, dys)
        trainer.step(len(batch[0]))
        found += [np.concatenate(ys), np.concatenate(dxs)]
    return found + values(net)


@functools.lru_cache(maxsize=None)
def truth():
    """Float64 values of nn.BatchNorm, and by how much its float32 values differ."""
    dtypes = "float64", "float32"
    right, rounded = (train(nn.BatchNorm, [8], dtype=d) for d in dtypes)
    return right, [abs(a - b).max() for a, b in zip(rounded, right)]


@pytest.mark.timeout(60 + 30 * REPEAT)
@pytest.mark.parametrize("mode", MODES)
def test_trains_like_one_context(mode):
    right, errors = truth()
    for repeat in range(REPEAT):
        found = train(gluon_syncbn.SyncBatchNorm, [2, 3, 1, 2], mode)
        assert len(found) == len(right) > 60
        for index, (value, expected, error) in enumerate(zip(found, right, errors)):
            scale = max(1.0, abs(expected).max())
            rtol, atol = reference.tolerance("float32", expected.size, scale=scale)
            # Steps amplify rounding. MXNet's own float32 run measures by how much.
            atol += 10 * error
            message = f"array {index}, repeat {repeat}"
            np.testing.assert_allclose(value, expected, rtol, atol, err_msg=message)


def test_gradients_in_blocked_layouts():
    """The convolution `top` passes `net` a gradient in a blocked layout."""
    net, top = (nn.Conv2D(16, 3, in_channels=n, use_bias=False) for n in (3, 16))
    net.initialize(mx.init.Xavier(), ctx=cpus(2))
    top.initialize(mx.init.Xavier())
    x = nd.array(np.random.default_rng(0).normal(size=(5, 3, 20, 20)))
    x.attach_grad()
    for number in range(1 + 3 * REPEAT):
        differentiate(lambda: (top(net(x)) ** 2).sum())
        found = [summed_grad(net.weight), x.grad.asnumpy()]
        if number == 0:
            expected = found
            gluon_syncbn.make_parallel(net, cpus(2))
        # Gradients of net.weight are sums of 1620 products, and of x sums of 144.
        assert_all_near(found, expected, "float32", count=2000, scale=30)
