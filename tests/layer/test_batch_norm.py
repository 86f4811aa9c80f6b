"""The numbers: N devices on their shards equal the float64 oracle on the whole batch.

y, dx, dgamma, dbeta and both running statistics, over a table that has every value of
every dimension (dtype, rank, axis, shards, data, mode) and the extreme sizes. Random
programs (tests/parallel/test_random_programs.py) have their combinations.
"""

from collections import namedtuple

import mxnet as mx
import numpy as np
import pytest
from support import reference
from support.helpers import (
    assert_near,
    put,
    set_mode,
    split_rows,
    summed_grad,
    train_step,
    value,
)

from gluon_syncbn import SyncBatchNorm

Case = namedtuple("Case", "shape axis rows dtype data mode")
CASES = [
    Case((4, 3), 1, [4], "float32", "normal", "imperative"),
    Case((8, 5), -1, [4, 4], "float32", "normal", "hybridize"),
    Case((6, 4, 7), 2, [1, 5], "float32", "far", "static_shape"),
    Case((7, 6, 5, 3), 3, [4, 2, 1], "float32", "normal", "hybridize"),
    Case((8, 3, 4, 4), 1, [2, 2, 2, 2], "float16", "far", "hybridize"),
    Case((4, 2, 3, 5, 3), 4, [1, 3], "float64", "constant", "imperative"),
    Case((5, 6), 0, [2, 4], "float32", "normal", "static_alloc"),
    Case((2, 3), 1, [1, 1], "float32", "normal", "imperative"),
    Case((1, 3, 1, 1), 1, [1], "float32", "normal", "hybridize"),
    Case((12, 70, 33, 31), 1, [5, 4, 3], "float32", "far", "hybridize"),
]


def make_data(case, rng):
    x = rng.normal(size=case.shape)
    if case.data == "far":
        x += 1e4
    if case.data == "constant":
        channels = [1] * x.ndim
        channels[case.axis] = case.shape[case.axis]
        x = np.broadcast_to(rng.normal(size=channels), case.shape)
    dy = rng.normal(size=case.shape)
    return x.astype(case.dtype), dy.astype(case.dtype)


def make_layer(case, contexts, rng):
    """A layer with random parameters, and these parameters."""
    channels = case.shape[case.axis]
    layer = SyncBatchNorm(axis=case.axis, num_devices=len(contexts))
    layer.cast(case.dtype)
    layer.initialize(ctx=contexts)
    kind = "float64" if case.dtype == "float64" else "float32"
    means = {"gamma": 0, "beta": 0, "running_mean": 1, "running_var": 3}
    parameters = {}
    for name, mean in means.items():
        parameters[name] = rng.normal(mean, 1, channels).astype(kind)
        getattr(layer, name).shape = (channels,)
        getattr(layer, name).set_data(mx.nd.array(parameters[name], dtype=kind))
    return layer, parameters, kind


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c}"[5:-1].replace(" ", ""))
def test_whole_batch(case, make_devices):
    rng = np.random.default_rng(sum(case.shape))
    devices = make_devices(len(case.rows))
    x, dy = make_data(case, rng)
    layer, parameters, kind = make_layer(case, devices.contexts, rng)
    set_mode(layer, case.mode)
    batch_axis = 1 if case.axis == 0 else 0
    shards, dys = (
        put(split_rows(v, case.rows, batch_axis), devices.contexts, case.dtype)
        for v in (x, dy)
    )
    ys, dxs = train_step(devices, layer, shards, dys)
    y, dx = (np.concatenate(v, batch_axis) for v in (ys, dxs))

    gamma, beta = parameters["gamma"], parameters["beta"]
    expected_y, mean, var, inv_std = reference.forward(x, gamma, beta, case.axis)
    expected_dx, dgamma, dbeta = reference.backward(x, dy, gamma, case.axis)
    ones, zeros = np.ones_like(gamma), np.zeros_like(beta)
    x_hat = reference.forward(x, ones, zeros, case.axis)[0]
    count = x.size // len(mean)
    far = {"count": count, "conditioning": reference.conditioning(x, case.axis)}

    assert y.dtype == dx.dtype == case.dtype
    scale = abs(gamma).max() * abs(x_hat).max() + abs(beta).max()
    assert_near(y, expected_y, case.dtype, scale=scale, **far)
    scale = abs(gamma * inv_std).max() * abs(dy).max()
    assert_near(dx, expected_dx, case.dtype, scale=scale, **far)
    scale = abs(dy.astype("float64") * x_hat).sum()
    assert_near(summed_grad(layer.gamma), dgamma, kind, scale=scale, **far)
    scale = abs(dy.astype("float64")).sum()
    assert_near(summed_grad(layer.beta), dbeta, kind, scale=scale, **far)
    for name, batch in ("running_mean", mean), ("running_var", var):
        expected = reference.update_running(parameters[name], batch, 0.9)
        scale = abs(expected).max()
        for index in range(len(case.rows)):
            result = value(getattr(layer, name), index)
            assert result.dtype == kind
            assert_near(result, expected, kind, scale=scale, **far)


def test_shards_of_different_spatial_sizes(devices):
    rng = np.random.default_rng(1)
    xs = [rng.normal(k, 1 + k, (2, 3, 4 + k, 5)).astype("float32") for k in range(2)]
    dys = [rng.normal(size=x.shape).astype("float32") for x in xs]
    layer = SyncBatchNorm(num_devices=2)
    layer.initialize(ctx=devices.contexts)
    contexts = devices.contexts
    ys, dxs = train_step(devices, layer, put(xs, contexts), put(dys, contexts))

    def flat(arrays):
        return np.concatenate([a.swapaxes(0, 1).reshape(3, -1).T for a in arrays])

    x, dy = flat(xs), flat(dys)
    expected_y, _, _, inv_std = reference.forward(x, np.ones(3), np.zeros(3))
    scale = abs(expected_y).max()
    assert_near(flat(ys), expected_y, count=len(x), scale=scale)
    scale = inv_std.max() * abs(dy).max()
    expected_dx = reference.backward(x, dy, np.ones(3))[0]
    assert_near(flat(dxs), expected_dx, count=len(x), scale=scale)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_number_reaches_every_device_but_no_other_channel(bad, devices):
    x = np.random.default_rng(2).normal(size=(4, 3, 2, 2)).astype("float32")
    x[0, 1, 0, 0] = bad
    layer = SyncBatchNorm(num_devices=2)
    layer.initialize(ctx=devices.contexts)
    shards = put(split_rows(x, [2, 2]), devices.contexts)
    with mx.autograd.train_mode():
        ys = [y.asnumpy() for y in devices.map(layer, shards)]
    for y in ys:
        assert np.isnan(y[:, 1]).any() and np.isfinite(y[:, [0, 2]]).all()
