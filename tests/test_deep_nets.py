"""Deep, branched float32 nets on several CPU contexts, over steps, again and again.

They catch what one layer does not show: inputs in oneDNN's blocked layouts that MXNet
frees too early, rounds that meet the wrong way round, and waits for each other's CPU
resources. GLUON_SYNCBN_REPEAT=100 repeats each comparison so often.
"""

import functools
import os

import mxnet as mx
import numpy as np
import pytest
import reference
from helpers import MODES, cpus, make_batches, set_mode, train, twins
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn

import gluon_syncbn

REPEAT = int(os.environ.get("GLUON_SYNCBN_REPEAT", 10))
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
    plain, _ = twins(deep_net, cpus(1), SHAPE, "float32")
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


@pytest.mark.timeout(60 + 30 * REPEAT)
@pytest.mark.parametrize("rows", [[3, 5], [2, 3, 1, 2]], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_trains_like_one_context(mode, rows, make_devices):
    check(mode, rows, make_devices(len(rows)), deep_net)


# Gluon's Sequential has a graph for each child: there a layer is a graph of its own,
# whose inputs and incoming gradients come out of convolutions.
@pytest.mark.timeout(60 + 30 * REPEAT)
@pytest.mark.parametrize("mode", ["hybridize", "static_alloc", "static_shape"])
def test_a_graph_for_each_child_trains_like_one_context(mode, devices):
    check(mode, [3, 5], devices, functools.partial(deep_net, container=nn.Sequential))


def check(mode, rows, devices, make_net):
    right, errors = truth()
    batches = make_batches((8, 4, 10, 10), SHAPE, STEPS, "float32")
    for repeat in range(REPEAT):
        _, net = twins(make_net, devices.contexts, SHAPE, "float32")
        values = train(set_mode(net, mode), devices, batches, rows, learning_rate=0.01)
        assert len(values) == len(right) > 60
        for index, (value, expected, error) in enumerate(zip(values, right, errors)):
            scale = max(1.0, abs(expected).max())
            rtol, atol = reference.tolerance("float32", expected.size, scale=scale)
            # Steps amplify rounding: by how much, MXNet's own float32 run measures.
            atol += 10 * error
            np.testing.assert_allclose(
                value, expected, rtol, atol, err_msg=f"array {index}, repeat {repeat}"
            )


def status(field):
    """A number of this process, for example VmRSS in KiB or Threads."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))


@pytest.mark.timeout(280)
def test_two_thousand_steps_neither_hang_nor_grow(devices):
    norm = functools.partial(gluon_syncbn.SyncBatchNorm, num_devices=2)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, padding=1), norm(), Unit(norm, 16), nn.Dropout(0.3))
    net.initialize(ctx=devices.contexts)
    net.hybridize()
    shards = devices.split(mx.nd.random.normal(shape=(4, 3, 8, 8)))

    def step(x):
        with autograd.record():
            y = net(x)
        y.backward()
        return y

    used = {}
    for number in range(1, 2001):
        ys = devices.map(step, shards)
        if number % 10 == 0:
            assert np.isfinite(ys[1].asnumpy()).all()
        if number in (1000, 2000):
            mx.nd.waitall()
            used[number] = status("VmRSS"), status("Threads")
    assert used[2000][0] - used[1000][0] < 16 * 1024, used
    assert used[2000][1] <= used[1000][1] + 1, used
