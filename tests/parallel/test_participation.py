"""participating: steps in which some devices sit out."""

import re

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support import reference
from support.helpers import assert_near, cpus

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, check_replicas, participating
from gluon_syncbn.distributed import groups_of


@pytest.fixture
def layer(make_devices):
    layer = SyncBatchNorm(in_channels=4, momentum=0.875)
    layer.cast("float64")
    layer.initialize(ctx=cpus(3))
    return layer


def step(layer, devices, active, x, dy):
    """A recorded step on the first `active` devices; returns the whole y and dx."""
    shards = [
        mx.nd.array(part, ctx=context, dtype="float64")
        for part, context in zip(np.array_split(x, active), devices.contexts)
    ]
    for shard in shards:
        shard.attach_grad()
    shards += [None] * (len(devices) - active)
    with autograd.record(), participating(layer, devices.contexts[:active]):
        ys = devices.map(lambda s: None if s is None else layer(s), shards)
    dys = [*np.array_split(dy, active), *[None] * (len(devices) - active)]

    def backward(y, dy):
        if y is not None:
            y.backward(mx.nd.array(dy, ctx=y.context, dtype="float64"))

    devices.map(backward, ys, dys)  # after the block, and yet on the same devices
    return (
        np.concatenate([y.asnumpy() for y in ys[:active]]),
        np.concatenate([s.grad.asnumpy() for s in shards[:active]]),
    )


def test_steps_with_changing_participants(layer, make_devices):
    devices = make_devices(3)
    rng = np.random.default_rng(0)
    gamma, beta = np.ones(4), np.zeros(4)
    running = {"mean": np.zeros(4), "var": np.ones(4)}
    for number, active in enumerate([1, 3, 2, 2, 3, 1, 3], start=1):
        x, dy = rng.normal(2, 3, (2, 5, 4))
        y, dx = step(layer, devices, active, x, dy)
        right, mean, var, _ = reference.forward(x, gamma, beta)
        right_dx, _, _ = reference.backward(x, dy, gamma)
        assert_near(y, right, "float64", count=5, scale=3)
        assert_near(dx, right_dx, "float64", count=5, scale=3)
        for name, batch in ("mean", mean), ("var", var):
            running[name] = 0.875 * running[name] + 0.125 * batch
            result = getattr(layer, f"running_{name}").list_data()[0].asnumpy()
            assert_near(result, running[name], "float64", count=5, scale=10)
        check_replicas(layer)
        assert layer.num_batches_tracked == number


def test_groups_of_contexts(make_devices):
    devices = make_devices(4)
    layer = SyncBatchNorm(in_channels=1, group=groups_of(2, devices.contexts))
    layer.initialize(ctx=devices.contexts)
    values = [0.0, 2.0, 5.0, 9.0]
    for active in (4, 3, 4):
        shards = [mx.nd.array([[v]], ctx=c) for v, c in zip(values, devices.contexts)]
        shards[active:] = [None] * (4 - active)
        with autograd.record(), participating(layer, devices.contexts[:active]):
            ys = devices.map(lambda s: None if s is None else layer(s), shards)
        expected = [-1, 1, -1, 1] if active == 4 else [-1, 1, 0]
        found = [y.asscalar() for y in ys[:active]]
        assert found == pytest.approx(expected, abs=1e-4)
        means = [m.asscalar() for m in layer.running_mean.list_data()]
        assert means[0] == means[1] != means[2] == means[3]


def test_who_sits_out_beside_a_failure_gets_statistics(make_devices):
    devices = make_devices(4)
    groups = groups_of(2, devices.contexts)
    layer = SyncBatchNorm(in_channels=1, group=groups, timeout=0.5)
    layer.initialize(ctx=devices.contexts)
    first, missing, sits_out, alone = devices.contexts
    shards = [mx.nd.array([[1.0], [5.0]], ctx=c) for c in devices.contexts]
    shards[1] = shards[2] = None
    with pytest.raises(mx.MXNetError, match=r"Missing: cpu\(1\)"):
        with autograd.train_mode(), participating(layer, [first, missing, alone]):
            ys = devices.map(lambda s: None if s is None else layer(s), shards)
            ys[3].wait_to_read()  # has what it needs, whatever becomes of the others
    gluon_syncbn.recover()
    means = [mean.asscalar() for mean in layer.running_mean.list_data()]
    assert means == pytest.approx([0, 0, 0.3, 0.3])


def test_all_take_part_again_after_an_error(layer, make_devices):
    devices = make_devices(3)
    x = np.random.default_rng(0).normal(size=(6, 4))
    with pytest.raises(RuntimeError, match="mine"):
        with participating(layer, cpus(1)):
            raise RuntimeError("mine")
    y, _ = step(layer, devices, 3, x, x)
    assert abs(y.mean(0)).max() < 1e-12


def test_a_device_that_sits_out_must_not_call_the_layer(layer, make_devices):
    devices = make_devices(3)
    shards = [mx.nd.ones((2, 4), ctx=c, dtype="float64") for c in devices.contexts]
    with pytest.raises(
        mx.MXNetError, match=r"cpu\(\d\) calls the layer, but only cpu\(1\) take part"
    ):
        with autograd.train_mode(), participating(layer, [mx.cpu(1)]):
            devices.map(layer, shards)
    gluon_syncbn.recover()


def test_a_context_without_the_layer_cannot_take_part(layer):
    words = (
        f"contexts names cpu(5), but SyncBatchNorm '{layer.name}' is initialized on "
        "cpu(0), cpu(1), cpu(2)"
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        with participating(layer, [mx.cpu(5)]):
            pass


def test_nets_without_the_layer_take_no_notice(make_devices):
    net = nn.Dense(1)
    net.initialize(ctx=cpus(2))
    with participating(net, cpus(1)):
        assert net(mx.nd.ones((2, 2))).shape == (2, 1)
