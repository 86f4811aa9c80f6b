"""Statistics and messages after batches with NaN, inf or one value per channel."""

import re

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from support import reference
from support.blocks import prefixed
from support.helpers import assert_all_near, put, ready, run_python, split_rows, value
from support.nd import nd

GOOD = np.random.default_rng(0).normal(2, 3, (6, 3, 4)).astype("float32")


def spoiled(bad, row):
    x = GOOD.copy()
    x[row, 1, 2] = bad
    return x


def make_layer(devices, **options):
    layer = SyncBatchNorm(in_channels=3, **prefixed("norm_"), **options)
    layer.initialize(ctx=devices.contexts)
    return layer


def call(devices, layer, x):
    with autograd.train_mode():
        ys = devices.map(layer, put(split_rows(x, [1, 5]), devices.contexts))
    return np.concatenate([y.asnumpy() for y in ys])


def assert_statistics(layer, devices, mean, var):
    for k in range(len(devices)):
        found = [value(p, k) for p in (layer.running_mean, layer.running_var)]
        assert_all_near(found, [mean, var], "float32", 24)


def test_momentum_0_or_1_drops_nan(devices):
    """Momentum 0 must drop an old NaN, and momentum 1 a new one. 0 * NaN is NaN."""
    _, mean, var, _ = reference.forward(GOOD, np.ones(3), np.zeros(3))
    layer = make_layer(devices, momentum=0)
    y = call(devices, layer, spoiled(np.nan, 1))
    assert np.isnan(y[:, 1]).all() and np.isfinite(y[:, [0, 2]]).all()
    assert np.isnan(value(layer.running_var, 1)[1])
    call(devices, layer, GOOD)
    assert_statistics(layer, devices, mean, var)
    layer = make_layer(devices, momentum=1)
    call(devices, layer, spoiled(np.nan, 1))
    assert_statistics(layer, devices, np.zeros(3), np.ones(3))


@pytest.mark.parametrize("rows, var", [(1, 0), (2, 2)])
def test_unbiased_variance_of_few_values(rows, var):
    """One value has the biased variance, because the unbiased one needs two."""
    layer = ready(SyncBatchNorm(in_channels=1, momentum=0, unbiased_running_var=True))
    with autograd.train_mode():
        layer(nd.array([[1], [3]])[:rows]).wait_to_read()
    assert value(layer.running_var) == var


# 1e21 gives a variance that is finite in float64 but not in float32.
BAD = np.nan, np.inf, 1e21


@pytest.mark.parametrize("bad", BAD)
def test_skip(bad, devices):
    layer = make_layer(devices, momentum=0.5, nonfinite="skip")
    _, mean, var, _ = reference.forward(GOOD, np.ones(3), np.zeros(3))
    call(devices, layer, GOOD)
    y = call(devices, layer, spoiled(bad, 0))
    assert np.isfinite(y[:, [0, 2]]).all()
    assert_statistics(layer, devices, mean / 2, (1 + var) / 2)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("row, device", [(0, "cpu(0)"), (3, "cpu(1)")])
def test_raise_names_the_shard(row, device, bad, devices):
    layer = make_layer(devices, nonfinite="raise")
    call(devices, layer, GOOD)
    before = value(layer.running_mean)
    pattern = f"'{layer.name}', forward.*channel 1.*{re.escape(device)}"
    with pytest.raises(mx.MXNetError, match=pattern):
        call(devices, layer, spoiled(bad, row))
    gluon_syncbn.recover()
    assert (value(layer.running_mean) == before).all()
    assert np.isfinite(call(devices, layer, GOOD)).all()


def test_finite_shards_with_an_infinite_variance_of_the_batch(devices):
    x = GOOD.copy()
    x[:, 1], x[0, 1] = 1e20, -1e20  # each shard alone has variance 0
    with pytest.raises(mx.MXNetError, match="whole batch.*finite"):
        call(devices, make_layer(devices, nonfinite="raise"), x)
    gluon_syncbn.recover()


ONE_VALUE = """
import sys
import gluon_syncbn, mxnet as mx
from support.helpers import ready
from support.nd import nd
layer = ready(gluon_syncbn.SyncBatchNorm(in_channels=3))
for rows in 2, 1, 1:
    print(rows, "rows", file=sys.stderr)
    with mx.autograd.train_mode():
        layer(nd.ones((rows, 3))).wait_to_read()
"""


def test_one_value_per_channel_warns_once_per_process():
    text = run_python(ONE_VALUE).stderr.partition("1 rows")[2]
    assert text.count("SyncBatchNorm 'batchnorm0' trains on one value per chan") == 1
