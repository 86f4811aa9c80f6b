"""Parents that are no HybridBlock, and a net that is cast after it ran."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import Block, nn
from support.helpers import (
    MODES,
    assert_near,
    assert_trains_like_one_context,
    set_mode,
    summed_grad,
)

from gluon_syncbn import SyncBatchNorm


class CustomParent(Block):
    """A Block that is no HybridBlock, with hybrid children."""

    def __init__(self, norm):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(5)
            self.norm = norm(axis=-1)

    def forward(self, x):
        return self.norm(self.dense(x)).tanh()


def sequential(norm):
    net = nn.Sequential()
    with net.name_scope():
        net.add(nn.Conv2D(4, 3), norm(), nn.Activation("relu"), nn.Conv2D(2, 2), norm())
    return net


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make_net", [sequential, CustomParent])
def test_children_are_hybrid(make_net, mode, devices):
    assert_trains_like_one_context(make_net, devices, (6, 3, 7, 6), [4, 2], mode)


@pytest.mark.parametrize("mode", MODES)
def test_net_that_is_cast_after_it_ran(mode):
    """Symbols of parameters keep the dtype that these had when they were first used."""

    def gradients(norm, context):
        mx.random.seed(1)
        net = nn.HybridSequential()
        net.add(nn.Conv2D(4, 3), norm(), nn.Conv2D(2, 3, activation="sigmoid"))
        net.initialize(mx.init.Xavier(), ctx=context)
        net(mx.nd.ones((2, 3, 8, 8)))
        net.cast("float64")
        set_mode(net, mode)
        rng = np.random.default_rng(0)
        with autograd.record():
            loss = net(mx.nd.array(rng.normal(size=(2, 3, 8, 8)), dtype="float64"))
        loss.backward()
        return [summed_grad(p) for p in net.collect_params(".*(weight|gamma)").values()]

    results, expected = (
        gradients(norm, [mx.cpu()]) for norm in (SyncBatchNorm, nn.BatchNorm)
    )
    assert len(results) == 3
    for result, right in zip(results, expected):
        assert_near(result, right, "float64", 72, scale=72 * abs(right).max())
