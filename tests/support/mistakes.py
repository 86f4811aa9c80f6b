"""Helpers for tests of users' mistakes: a small layer, its data, an error's text."""

from gluon_syncbn import SyncBatchNorm

import mxnet as mx
import numpy as np
import pytest

from support import reference
from support.helpers import assert_near, train_step

SHAPE = (4, 3, 2, 5)
X, DY = np.random.default_rng(0).normal(1, 2, (2, *SHAPE)).astype("float32")


def make_layer(contexts, timeout=0.5, **arguments):
    layer = SyncBatchNorm(in_channels=3, timeout=timeout, **arguments)
    layer.initialize(ctx=contexts)
    return layer


def make_shards(devices, x=X):
    return devices.split(x)


def assert_trains(devices, layer):
    """Check that a step gives y and dx of the oracle."""
    ys, dxs = train_step(devices, layer, make_shards(devices), make_shards(devices, DY))
    ones, zeros = np.ones(3), np.zeros(3)
    expected, _, _, inv_std = reference.forward(X, ones, zeros)
    assert_near(np.concatenate(ys), expected, count=40, scale=abs(expected).max())
    scale = inv_std.max() * abs(DY).max()
    expected = reference.backward(X, DY, ones)[0]
    assert_near(np.concatenate(dxs), expected, count=40, scale=scale)


def failure_of(wait, *arguments):
    with pytest.raises(mx.MXNetError) as caught:
        wait(*arguments)
    return str(caught.value)


def map_and_wait(devices, function, *lists):
    for y in devices.map(function, *lists):
        y.wait_to_read()
