"""Numbers, calls and mistakes that random programs of the layer do not cover."""

import re

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.compat import IS_GLUON_2

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support import reference
from support.helpers import (
    assert_all_near,
    assert_trains,
    differentiate,
    make_layer,
    output_of,
    put,
    ready,
    run_python,
    set_mode,
    split_rows,
    step_of_layer,
    summed_grad,
    value,
)
from support.nd import nd

NORMAL = np.random.default_rng(0).normal(size=(2, 64, 3))


@pytest.mark.parametrize("function", ["identity", "leaky_relu"])
def test_dgamma_of_a_constant_channel_is_zero(function):
    """Backward must read a copy of x, because it cannot reconstruct x from y = beta."""
    x, dy = np.full((8, 1), 0.7, "float16"), NORMAL[0, :8, :1]
    options = {"activation": function, "beta_initializer": mx.init.Constant(3.3)}
    assert step_of_layer(x, dy, **options)[2] == 0


@pytest.mark.parametrize("exponent", [400, -380])
def test_dx_of_extreme_deviations(exponent):
    """A power of two as a factor of x only changes exponents of dx if epsilon is 0."""
    x, dy = NORMAL
    factors = 1.0, 2.0**exponent
    dxs = [step_of_layer(x * f, dy, epsilon=0)[1] * f for f in factors]
    np.testing.assert_array_equal(*dxs)


@pytest.mark.parametrize("train_mode", [True, False])
def test_gradients_where_y_overflows(train_mode):
    """A large slope makes y infinite in float16 although x_hat is small."""
    (x, dy), options = NORMAL.astype("float16"), {"activation": "leaky_relu"}
    (_, dx, dgamma), (_, dx16, dgamma16) = (
        step_of_layer(x.astype(dtype), dy / 1e5, train_mode, slope=1e5, **options)
        for dtype in ("float64", "float16")
    )
    # dy / 1e5 is rounded to a subnormal float16, by 2**-25.
    assert np.abs(dx16 - dx).max() < 4 * 1e5 * 2.0**-25 + 2.0**-10 * np.abs(dx).max()
    assert np.isfinite(dgamma16).all() and np.abs(dgamma16 - dgamma).max() < 1


def test_gradients_with_a_large_beta():
    """Backward must not reconstruct x from y, whose rounding errors are large."""
    x, dy = NORMAL.astype("float16")
    options = {"beta_initializer": mx.init.Constant(700)}
    kept, reconstructed = (
        step_of_layer(x, dy, activation=activation, **options)[1:]
        for activation in (None, "identity")
    )
    for right, found in zip(kept, reconstructed):
        np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("function, y", [("relu", 0), ("leaky_relu", -np.inf)])
def test_infinities_in_inference(function, y):
    """If x < 0, a ReLU replaces infinite x and dy by 0. A leaky ReLU keeps them."""
    x, dy = np.float32([[-np.inf, np.inf, np.nan, -1], [1, 1, 1, np.inf]])
    found, dx, _ = step_of_layer(x[:, None], dy[:, None], False, activation=function)
    np.testing.assert_array_equal(found[:3, 0], [y, np.inf, np.nan])
    assert dx[3, 0] == (0 if function == "relu" else np.inf)


def test_net_that_is_cast_after_it_ran():
    """A graph has the new dtype, although symbols of parameters keep the former one."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), SyncBatchNorm(), nn.Conv2D(2, 3, activation="sigmoid"))
    net.initialize(mx.init.Xavier())
    net(nd.ones((2, 3, 8, 8)))
    net.cast("float64")
    x, found = nd.random.normal(shape=(2, 3, 8, 8), dtype="float64"), []
    for mode in "imperative", "hybridize", "static_shape":
        set_mode(net, mode)
        differentiate(net, x)
        learned = net.collect_params(".*(weight|gamma)").values()
        found.append(list(map(summed_grad, learned)))
        assert_all_near(found[-1], found[0], "float64", 72, 72)


# ---- Wrong or extreme values.


def test_timeout_in_an_environment_variable():
    program = "import gluon_syncbn; print(gluon_syncbn.get_timeout())"
    assert output_of(program, GLUON_SYNCBN_TIMEOUT="7.5") == "7.5\n"
    error = run_python(program, GLUON_SYNCBN_TIMEOUT="soon").stderr.splitlines()[-1]
    assert error.startswith("ValueError: GLUON_SYNCBN_TIMEOUT") and "'soon'" in error


@pytest.mark.parametrize("seconds", [9.3e9, 1e10, 10**400, float("inf")])
def test_huge_timeout_means_no_limit(seconds, devices):
    gluon_syncbn.set_timeout(seconds)
    for timeout in None, seconds:
        assert_trains(devices, make_layer(devices.contexts, timeout, num_devices=2))


# ---- NaN, inf or one value per channel.

GOOD = np.random.default_rng(0).normal(2, 3, (6, 3, 4)).astype("float32")


def spoiled(bad, row):
    x = GOOD.copy()
    x[row, 1, 2] = bad
    return x


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
    layer = make_layer(devices.contexts, None, momentum=0)
    y = call(devices, layer, spoiled(np.nan, 1))
    assert np.isnan(y[:, 1]).all() and np.isfinite(y[:, [0, 2]]).all()
    assert np.isnan(value(layer.running_var, 1)[1])
    call(devices, layer, GOOD)
    assert_statistics(layer, devices, mean, var)
    layer = make_layer(devices.contexts, None, momentum=1)
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
    layer = make_layer(devices.contexts, None, momentum=0.5, nonfinite="skip")
    _, mean, var, _ = reference.forward(GOOD, np.ones(3), np.zeros(3))
    call(devices, layer, GOOD)
    y = call(devices, layer, spoiled(bad, 0))
    assert np.isfinite(y[:, [0, 2]]).all()
    assert_statistics(layer, devices, mean / 2, (1 + var) / 2)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("row, device", [(0, "cpu(0)"), (3, "cpu(1)")])
def test_raise_names_the_shard(row, device, bad, devices):
    layer = make_layer(devices.contexts, None, nonfinite="raise")
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
        call(devices, make_layer(devices.contexts, None, nonfinite="raise"), x)
    gluon_syncbn.recover()


ONE_VALUE = """
import gluon_syncbn, mxnet as mx, sys
from support.helpers import cpus, ready
from support.nd import nd
layer = gluon_syncbn.SyncBatchNorm(in_channels=3)
net = ready(gluon_syncbn.make_parallel(layer, cpus(2)))
for rows in 2, 1, 1:
    with mx.autograd.train_mode():
        net(nd.ones((rows, 3))).wait_to_read()
    print('trained with', rows, file=sys.stderr)
"""


def test_one_value_per_channel_in_the_whole_batch_warns_once_per_process():
    lines = run_python(ONE_VALUE).stderr.splitlines()
    lines = [x for x in lines if "StorageManager" not in x]  # MXNet 2 writes it
    first, *_, warning, _, _ = lines
    assert first == "trained with 2"  # one row for each device
    name = "SyncBatchNorm" if IS_GLUON_2 else "batchnorm0"
    assert f"SyncBatchNorm '{name}' trains on one value per chan" in warning
