"""Frozen statistics: MXNet's own operator, for every kind of net, and back again."""

from functools import partial

from gluon_syncbn import (
    SyncBatchNorm,
    check_replicas,
    freeze_statistics,
    make_parallel,
)

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support.helpers import (
    MODES,
    assert_all_near,
    cpus,
    operators,
    put,
    set_mode,
    split_rows,
    summed_grad,
    values,
    whole,
)
from support.nd import nd

SHAPE = 5, 4, 6, 3
LAYERS = {
    "plain": nn.BatchNorm,
    "ours": SyncBatchNorm,
    "relu": partial(SyncBatchNorm, activation="relu"),
    "leaky_relu": partial(SyncBatchNorm, activation="leaky_relu"),
}


def initialized(net, contexts):
    """Give parameters and statistics other values than the initial ones."""
    net.cast("float64")
    net.initialize(ctx=contexts)
    rng = np.random.default_rng(3)
    for parameter in net.collect_params().values():
        data = 0.5 + rng.random(parameter.shape)
        parameter.set_data(nd.array(data, dtype="float64"))
    return net


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axis, layer", [(1, n) for n in LAYERS] + [(-1, "ours")])
def test_a_frozen_layer_trains_with_its_running_statistics(axis, layer, mode, devices):
    """It equals the layer that is not frozen outside of training mode."""
    options = {"axis": axis, "in_channels": SHAPE[axis]}
    net = initialized(LAYERS[layer](**options), devices.contexts)
    set_mode(net, mode)
    x, dy = np.random.default_rng(1).normal(1, 2, (2, *SHAPE))

    def step(train_mode):
        shards, heads = (
            put(split_rows(v, [1, 4]), devices.contexts, "float64") for v in (x, dy)
        )

        def call(shard, head):
            shard.attach_grad()
            with autograd.record(train_mode=train_mode):
                y = net(shard)
            y.backward(head, train_mode=train_mode)
            return y

        ys = devices.map(call, shards, heads)
        found = [whole(ys), whole([shard.grad for shard in shards])]
        return found + [summed_grad(p) for p in (net.gamma, net.beta)]

    step(True)
    for parameter in net.running_mean, net.running_var:
        parameter.set_data(parameter.data(devices.contexts[0]))  # if it is plain
    expected, before = step(False), values(net, 1)
    assert freeze_statistics(net) is net
    # MXNet computes a LeakyReLU in float32.
    dtype = "float32" if layer == "leaky_relu" else "float64"
    assert_all_near(step(True), expected, dtype, count=90, scale=90)
    assert all((a == b).all() for a, b in zip(before, values(net, 1)))
    found = operators(net, nd.ones(SHAPE, dtype="float64"))
    assert "BatchNorm" in found and "Custom" not in found


def statistics(net):
    found = net.collect_params(".*running_(mean|var)").values()
    return [array.asnumpy() for p in found for array in p.list_data()]


def step(net, rows=5):
    with autograd.record():
        y = net(nd.random.normal(1, shape=(rows, 3, 4, 4)))
    y.backward()
    mx.nd.waitall()


def changes(net, **options):
    """Return True and False as a training step changes some statistics or not."""
    before = statistics(net)
    step(net, **options)
    return {(a != b).any() for a, b in zip(before, statistics(net))}


def backbone_and_head(norm=nn.BatchNorm):
    net = nn.HybridSequential()
    for _ in range(2):  # the ReLU lets the second mean change
        net.add(nn.HybridSequential())
        net[-1].add(nn.Conv2D(3, 1, in_channels=3), norm(in_channels=3))
        net[-1].add(nn.Activation("relu"))
    return net


@pytest.mark.parametrize("mode", MODES)
def test_a_part_of_a_parallel_net_that_was_called(mode):
    """Its graph was traced by the block around it."""
    net = make_parallel(backbone_and_head(), cpus(2))
    net.initialize()
    set_mode(net, mode)
    step(net)
    freeze_statistics(net[0])
    assert changes(net[0], rows=1) == {False}  # one device runs alone
    assert changes(net) == {False, True}
    freeze_statistics(net)
    assert changes(net) == {False} == changes(net, rows=1)
    freeze_statistics(net, False)
    assert changes(net) == {True}
    check_replicas(net)  # they are synchronized again
