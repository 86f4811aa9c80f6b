"""Frozen statistics: MXNet's own operator, for every kind of net, and back again."""

from functools import partial

from gluon_syncbn import (
    SyncBatchNorm,
    check_replicas,
    freeze_statistics,
    make_parallel,
    revert_sync_batchnorm,
)

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import SymbolBlock, nn
from support import reference
from support.blocks import gluon_1_only
from support.helpers import (
    MODES,
    assert_near,
    cpus,
    operators,
    put,
    set_mode,
    split_rows,
    train_step,
    values,
)
from support.nd import nd

SHAPE = 5, 4, 6, 3
LAYERS = {
    "plain": nn.BatchNorm,
    "ours": SyncBatchNorm,
    "relu": partial(SyncBatchNorm, activation="relu"),
    "leaky_relu": partial(SyncBatchNorm, activation="leaky_relu"),
}


def initialized(net, contexts, dtype="float64", shape=None):
    """Parameters and statistics that are none of the initial ones."""
    net.cast(dtype)
    net.initialize(ctx=contexts)
    if shape is not None:
        net(nd.ones(shape, dtype=dtype))
    rng = np.random.default_rng(3)
    for parameter in net.collect_params().values():
        parameter.set_data(nd.array(0.5 + rng.random(parameter.shape), dtype=dtype))
    return net


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axis, layer", [(1, n) for n in LAYERS] + [(-1, "ours")])
def test_a_frozen_layer_is_mxnets_operator(axis, layer, mode, devices):
    """Its statistics, and the activation of the layer, after a training step."""
    options = {"axis": axis, "in_channels": SHAPE[axis]}
    net = initialized(LAYERS[layer](**options), devices.contexts)
    set_mode(net, mode)
    x, dy = np.random.default_rng(1).normal(1, 2, (2, *SHAPE))
    shards, dys = (
        put(split_rows(v, [1, 4]), devices.contexts, "float64") for v in (x, dy)
    )
    train_step(devices, net, shards, dys)
    for parameter in net.running_mean, net.running_var:
        parameter.set_data(parameter.data(devices.contexts[0]))  # if it is plain
    assert freeze_statistics(net) is net
    before = values(net, 1)
    gamma, beta, mean, var = before
    ys, dxs = train_step(devices, net, shards, dys)
    assert all((a == b).all() for a, b in zip(before, values(net, 1)))
    activation = getattr(net, "activation", None)
    z = reference.inference_forward(x, gamma, beta, mean, var, axis)
    y = reference.activate(z, activation, 0.01)
    # MXNet computes a LeakyReLU in float32.
    dtype = "float32" if layer == "leaky_relu" else "float64"
    near = partial(assert_near, dtype=dtype, count=x.size // len(mean))
    a = gamma / np.sqrt(var + 1e-5)
    # MXNet may compute a x + (beta - a mean).
    near(np.concatenate(ys), y, scale=(a * (abs(x).max() + mean) + beta).max())
    shape = [-1 if k == axis % 4 else 1 for k in range(4)]
    dx = dy * reference.activation_gradient(z, activation, 0.01) * a.reshape(shape)
    near(np.concatenate(dxs), dx, scale=abs(dx).max())
    found = operators(net, shards[0])
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
    """Which statistics a training step changes."""
    before = statistics(net)
    step(net, **options)
    return {(a != b).any() for a, b in zip(before, statistics(net))}


def backbone_and_head(norm=nn.BatchNorm):
    net = nn.HybridSequential()
    for _ in range(2):  # without a ReLU the second mean would be the same each time
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


def graph_net(norm):
    return SymbolBlock(backbone_and_head(norm)(mx.sym.var("data")), mx.sym.var("data"))


@gluon_1_only("blocks take no symbols")
@pytest.mark.parametrize("norm", ["plain", "ours", "leaky_relu"])
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_symbol_blocks(norm, when):
    """Frozen before they are converted, before the first call, or after it."""
    net = graph_net(LAYERS[norm])
    if when == "before":
        freeze_statistics(net)
    parallel = make_parallel(net, cpus(2))
    initialized(parallel, cpus(2), "float32", (2, 3, 4, 4))
    if when == "after":
        assert changes(parallel) == {True}
    freeze_statistics(parallel)
    assert "Custom" not in operators(net)
    assert changes(parallel) == {False} == changes(parallel, rows=1)
    x = nd.random.normal(shape=(4, 3, 4, 4))
    frozen = parallel(x).asnumpy()
    freeze_statistics(parallel, False)
    assert operators(net).count("Custom") == 2
    np.testing.assert_allclose(parallel(x).asnumpy(), frozen, 1e-5, 1e-5)
    assert changes(parallel) == {True}
    revert_sync_batchnorm(freeze_statistics(net))
    assert operators(net).count("BatchNorm") == 2 and "Custom" not in operators(net)
    assert changes(parallel) == {False}
