"""The layer where random programs do not go: shapes, numbers and arrays of other kinds.

Random programs (tests/parallel/test_random_programs.py) compare y, dx, dgamma, dbeta
and running statistics with the float64 oracle for every combination of arguments.
"""

import copy

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
    summed_grad,
    train_step,
    value,
    whole,
)

from gluon_syncbn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm

SHAPE = (6, 3, 4, 5)
COUNT = 6 * 4 * 5
ONES, ZEROS = np.ones(3), np.zeros(3)


def batch():
    rng = np.random.default_rng(0)
    return rng.normal(2, 3, SHAPE), rng.normal(size=SHAPE)


def shards_of(array, devices, dtype="float64"):
    return put(split_rows(array, [2, 4]), devices.contexts, dtype)


def make_layer(devices, dtype="float32", **arguments):
    layer = SyncBatchNorm(num_devices=len(devices), **arguments)
    layer.cast(dtype)
    layer.initialize(ctx=devices.contexts)
    return layer


def assert_close(result, expected, dtype="float64"):
    """Compares results whose terms are of order 10."""
    scale = 10 * abs(np.asarray(expected)).max() + 10
    assert_near(result, expected, dtype, COUNT, scale=scale)


# ---- shapes and arrays ---------------------------------------------------------------


def test_shards_of_different_spatial_sizes(devices):
    rng = np.random.default_rng(1)
    xs = [rng.normal(k, 1 + k, (2, 3, 4 + k, 5)) for k in range(2)]
    dys = [rng.normal(size=x.shape) for x in xs]
    shards, dy_shards = (put(v, devices.contexts, "float64") for v in (xs, dys))
    ys, dxs = train_step(devices, make_layer(devices, "float64"), shards, dy_shards)

    def flat(arrays):
        return np.concatenate([a.swapaxes(0, 1).reshape(3, -1).T for a in arrays])

    x, dy = flat(xs), flat(dys)
    assert_close(flat(ys), reference.forward(x, ONES, ZEROS)[0])
    assert_close(flat(dxs), reference.backward(x, dy, ONES)[0])


@pytest.mark.parametrize("mode", MODES)
def test_numpy_arrays(mode, devices):
    layer = set_mode(make_layer(devices, "float64"), mode)
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
        dx = whole([shard.grad for shard in shards])
        assert_close(dx, reference.backward(x, dy, ONES)[0])


# ---- numbers that are not finite -----------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_number_reaches_every_device_but_no_other_channel(bad, devices):
    x, _ = batch()
    x[0, 1, 0, 0] = bad
    with autograd.train_mode():
        ys = devices.map(make_layer(devices), shards_of(x, devices, "float32"))
    for y in (y.asnumpy() for y in ys):
        assert np.isnan(y[:, 1]).any() and np.isfinite(y[:, [0, 2]]).all()


def test_infinities_in_inference():
    """On the flat side of a ReLU nothing is left of them, as in MXNet."""
    x = mx.nd.array(np.array([[-np.inf, np.inf, np.nan, -1]], "float32").T)
    for function, of_minus_infinity in ("relu", 0), ("leaky_relu", -np.inf):
        layer = SyncBatchNorm(num_devices=1, activation=function)
        layer.initialize()
        x.attach_grad()
        with autograd.record(train_mode=False):
            y = layer(x)
        y.backward(mx.nd.array(np.array([[1, 1, 1, np.inf]]).T))
        expected = [of_minus_infinity, np.inf, np.nan]
        np.testing.assert_array_equal(y.asnumpy()[:3, 0], expected)
        slope = 0 if function == "relu" else np.inf  # times dy
        assert x.grad.asnumpy()[3, 0] == slope


# ---- the block -----------------------------------------------------------------------


def test_number_of_batches_can_be_restored(devices):
    layer = make_layer(devices, "float64", momentum=None, in_channels=3)
    layer.num_batches_tracked = 3
    x, _ = batch()
    with autograd.train_mode():
        devices.map(layer, shards_of(x, devices))
    mean = reference.forward(x, ONES, ZEROS)[1]
    assert_close(value(layer.running_mean), mean / 4)
    assert layer.num_batches_tracked == 4


def test_statistics_of_more_contexts_than_shards(devices):
    """Two of three contexts hold shards, as num_devices says."""
    layer = SyncBatchNorm(num_devices=2)
    layer.initialize(ctx=cpus(3))
    x = batch()[0].astype("float32")
    with autograd.train_mode():
        y = whole(devices.map(layer, shards_of(x, devices, "float32")))
    assert_close(y, reference.forward(x, ONES, ZEROS)[0], "float32")


@pytest.mark.parametrize("initialized", [False, True])
def test_a_copy_has_its_own_group(initialized, devices):
    layer = SyncBatchNorm(num_devices=2, in_channels=3)
    if initialized:
        layer.initialize(ctx=devices.contexts)
    twin = copy.deepcopy(layer)
    for each in layer, twin:
        each.initialize(ctx=devices.contexts, force_reinit=True)
    with autograd.train_mode():
        shards = shards_of(batch()[0], devices, "float32")
        ys = devices.map(lambda shard: twin(layer(shard)), shards)
    assert np.isfinite(ys[1].asnumpy()).all()
    assert layer.num_batches_tracked == twin.num_batches_tracked == 1


@pytest.mark.parametrize("mode", MODES)
def test_net_that_is_cast_after_it_ran(mode):
    """Symbols of parameters keep the dtype that these had when they were first used."""

    def gradients(norm):
        mx.random.seed(1)
        net = nn.HybridSequential()
        net.add(nn.Conv2D(4, 3), norm(), nn.Conv2D(2, 3, activation="sigmoid"))
        net.initialize(mx.init.Xavier())
        net(mx.nd.ones((2, 3, 8, 8)))
        net.cast("float64")
        set_mode(net, mode)
        rng = np.random.default_rng(0)
        with autograd.record():
            loss = net(mx.nd.array(rng.normal(size=(2, 3, 8, 8)), dtype="float64"))
        loss.backward()
        return [summed_grad(p) for p in net.collect_params(".*(weight|gamma)").values()]

    results, expected = gradients(SyncBatchNorm), gradients(nn.BatchNorm)
    assert len(results) == 3
    for result, right in zip(results, expected):
        assert_near(result, right, "float64", 72, scale=72 * abs(right).max())


KINDS = {"identity": None, "relu": None, "leaky_relu": 0.01, "elu": 1.0}


@pytest.mark.parametrize("function", KINDS)
def test_a_reverted_activation_computes_the_same(function):
    layer = SyncBatchNorm(num_devices=1, activation=function)
    layer.initialize()
    x = mx.nd.array(batch()[0])
    y, text = layer(x).asnumpy(), repr(layer)
    assert KINDS[function] is None or f"slope={KINDS[function]}" in text
    assert revert_sync_batchnorm(layer) is layer
    assert isinstance(layer, nn.BatchNorm) and not isinstance(layer, SyncBatchNorm)
    np.testing.assert_allclose(layer(x).asnumpy(), y, 1e-5, 1e-5)
    assert repr(convert_sync_batchnorm(layer, 1)) == text
    np.testing.assert_array_equal(layer(x).asnumpy(), y)
