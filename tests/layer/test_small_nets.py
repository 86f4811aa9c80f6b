"""Small nets train like one context in every mode: shapes of parents and branches."""

from functools import partial

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, nn
from support.helpers import (
    MODES,
    assert_near,
    assert_trains_like_one_context,
    set_mode,
    summed_grad,
)

from gluon_syncbn import SyncBatchNorm


class OneLayerTwice(HybridBlock):
    """A layer that normalizes two tensors in one forward call."""

    def __init__(self, norm):
        super().__init__()
        with self.name_scope():
            # No momentum: MXNet applies the two updates in the other order.
            self.first = nn.Conv2D(4, 3, padding=1)
            self.shared = norm(momentum=1.0)
            self.second = nn.Conv2D(4, 3, padding=1)

    def hybrid_forward(self, F, x):
        x = F.relu(self.shared(self.first(x)))
        return self.shared(self.second(x)) + self.shared(x)


class Branches(HybridBlock):
    """Branches side by side, as in ASPP, which are called in the given order."""

    def __init__(self, norm, order):
        super().__init__()
        self.order = order
        with self.name_scope():
            self.branches = []
            for dilation in 1, 2, 3, 4:
                branch = nn.HybridSequential()
                branch.add(
                    nn.Conv2D(4, 3, padding=dilation, dilation=dilation),
                    norm(),
                    nn.Activation("relu"),
                )
                self.branches.append(branch)
                self.register_child(branch)

    def hybrid_forward(self, F, x):
        return sum(self.branches[i](x) for i in self.order)


class CustomParent(Block):
    """A Block that is no HybridBlock, with hybrid children."""

    def __init__(self, norm):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(5)
            self.norm = norm(axis=-1)

    def forward(self, x):
        return self.norm(self.dense(x)).tanh()


def stack(container, norm):
    net = container()
    with net.name_scope():
        net.add(nn.Conv2D(4, 3), norm(), nn.Activation("relu"), nn.Conv2D(2, 2), norm())
    return net


NETS = {
    "sequential": partial(stack, nn.Sequential),
    "hybrid_sequential": partial(stack, nn.HybridSequential),
    "custom_parent": CustomParent,
    "one_layer_twice": OneLayerTwice,
    "branches": partial(Branches, order=(0, 1, 2, 3)),
    "branches_otherwise": partial(Branches, order=(2, 0, 3, 1)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("net", NETS)
def test_net_trains_like_one_context(net, mode, devices):
    assert_trains_like_one_context(NETS[net], devices, (6, 3, 7, 6), [4, 2], mode)


@pytest.mark.parametrize("count", [3, 4])
def test_more_contexts_train_like_one(count, make_devices):
    rows = [3, 1, 2, 2][:count]
    shape = (sum(rows), 3, 6, 6)
    make_net = NETS["hybrid_sequential"]
    assert_trains_like_one_context(make_net, make_devices(count), shape, rows)


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
