"""Ways to make and to call a layer that random programs leave out."""

import copy
import json

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support import reference
from support.helpers import (
    MODES,
    assert_near,
    cpus,
    put,
    set_mode,
    split_rows,
    value,
    whole,
)

from gluon_syncbn import SyncBatchNorm

SHAPE = (6, 3, 4, 5)
COUNT = 6 * 4 * 5
ONES, ZEROS = np.ones(3), np.zeros(3)


def batch(seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(2, 3, SHAPE), rng.normal(size=SHAPE))


def shards_of(array, devices, rows=(2, 4)):
    return put(split_rows(array, rows), devices.contexts, "float64")


def make_layer(devices, **arguments):
    layer = SyncBatchNorm(num_devices=len(devices), **arguments)
    layer.cast("float64")
    layer.initialize(ctx=devices.contexts)
    return layer


def whole_grad(shards):
    return whole([shard.grad for shard in shards])


def assert_close(result, expected):
    """Compares float64 results of float64 data, whose terms are of order 10."""
    scale = 10 * abs(np.asarray(expected)).max() + 10
    assert_near(result, expected, "float64", COUNT, scale=scale)


def test_number_of_batches_can_be_restored(devices):
    layer = make_layer(devices, momentum=None, in_channels=3)
    layer.num_batches_tracked = 3
    x, _ = batch()
    with autograd.train_mode():
        devices.map(layer, shards_of(x, devices))
    mean = reference.forward(x, ONES, ZEROS)[1]
    assert_close(value(layer.running_mean), mean / 4)
    assert layer.num_batches_tracked == 4


@pytest.mark.parametrize("mode", MODES)
def test_numpy_arrays(mode, devices):
    layer = set_mode(make_layer(devices), mode)
    x, dy = batch()
    with mx.util.np_shape(True), mx.util.np_array(True):
        shards, dys = (
            [s.as_np_ndarray() for s in shards_of(v, devices)] for v in (x, dy)
        )
        for shard in shards:
            shard.attach_grad()
        with autograd.record():
            ys = devices.map(layer, shards)
        assert all(isinstance(y, mx.np.ndarray) for y in ys)
        devices.map(lambda y, head: y.backward(head), ys, dys)
        assert_close(whole(ys), reference.forward(x, ONES, ZEROS)[0])
        assert_close(whole_grad(shards), reference.backward(x, dy, ONES)[0])


def test_cast_to_float16_keeps_parameters_in_float32(devices):
    net = nn.HybridSequential()  # of layers that MXNet has in float16 on a CPU
    net.add(SyncBatchNorm(num_devices=2), nn.Activation("relu"), nn.MaxPool2D(2))
    net.cast("float16")
    net.initialize(ctx=devices.contexts)
    x = batch()[0].astype("float16")
    shards = put(split_rows(x, [2, 4]), devices.contexts, "float16")
    with autograd.train_mode():
        ys = devices.map(net[0], shards)
        outputs = devices.map(net[1:], ys)
    assert {y.dtype for y in ys + outputs} == {np.float16}
    assert {p.dtype for p in net.collect_params().values()} == {"float32"}
    expected = reference.forward(x, ONES, ZEROS)[0]
    assert_near(whole(ys), expected, "float16", COUNT, scale=abs(expected).max())


@pytest.mark.parametrize("initialized", [False, True])
def test_deepcopy_has_a_group_of_its_own(initialized, devices):
    layer = SyncBatchNorm(num_devices=2, in_channels=3)
    if initialized:
        layer.initialize(ctx=devices.contexts)
    twin = copy.deepcopy(layer)
    twin.initialize(ctx=devices.contexts, force_reinit=True)
    layer.initialize(ctx=devices.contexts, force_reinit=True)
    x, _ = batch()
    shards = put(split_rows(x, [2, 4]), devices.contexts)
    with autograd.train_mode():
        ys = devices.map(lambda shard: twin(layer(shard)), shards)
    assert np.isfinite(ys[1].asnumpy()).all()
    assert layer.num_batches_tracked == twin.num_batches_tracked == 1


def assert_normalizes(layer, devices, rows):
    x, _ = batch()
    with autograd.train_mode():
        ys = devices.map(layer, put(split_rows(x, rows), devices.contexts))
    expected = reference.forward(x.astype("float32"), ONES, ZEROS)[0]
    assert_near(whole(ys), expected, scale=10)


def test_number_of_devices_is_that_of_the_initialization(make_devices):
    devices = make_devices(3)
    layer = SyncBatchNorm()
    assert layer.num_devices is None
    layer.initialize(ctx=devices.contexts)
    assert layer.num_devices == 3
    assert_normalizes(layer, devices, [2, 2, 2])


def test_statistics_of_more_contexts_than_shards(devices):
    """Two of three contexts hold shards, as num_devices says."""
    layer = SyncBatchNorm(num_devices=2)
    layer.initialize(ctx=cpus(3))
    assert_normalizes(layer, devices, [2, 4])


def test_symbol_made_by_hand_is_guarded_for_every_mode():
    """Outside of Gluon's trace a layer cannot know what it will be a part of."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), SyncBatchNorm(num_devices=1), nn.Conv2D(4, 3))
    nodes = json.loads(net(mx.sym.var("data")).tojson())["nodes"]
    (node,) = (node for node in nodes if node["op"] == "Custom")
    assert node["attrs"]["guard"] == "any"
