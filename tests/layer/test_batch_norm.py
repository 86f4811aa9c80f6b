"""Shapes, numbers, calls and mistakes that random programs of the layer do not cover.

Random programs (tests/parallel/test_random_programs.py) compare y, dx, dgamma, dbeta
and running statistics with the float64 oracle for random combinations of arguments.
"""

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support.helpers import (
    assert_all_near,
    differentiate,
    output_of,
    run_python,
    set_mode,
    summed_grad,
)
from support.mistakes import assert_trains, make_layer
from support.nd import nd

X = np.random.default_rng(0).normal(2, 3, (6, 3, 4, 5)).astype("float32")


@pytest.mark.parametrize("function", ["identity", "leaky_relu"])
def test_dgamma_of_a_constant_channel_is_zero(function):
    """Backward must read a copy of x, because it cannot reconstruct x from y = beta."""
    layer = SyncBatchNorm(
        in_channels=1, activation=function, beta_initializer=mx.init.Constant(3.3)
    )
    layer.cast("float16")
    layer.initialize()
    with autograd.record():
        y = layer(nd.array(np.full((8, 1), 0.7), dtype="float16"))
    y.backward(nd.array(np.random.default_rng(0).normal(size=(8, 1)), dtype="float16"))
    assert layer.gamma.grad().asnumpy() == 0


@pytest.mark.parametrize("exponent", [400, -380])
def test_dx_of_extreme_deviations(exponent):
    """A power of two as a factor of x only changes exponents of dx if epsilon is 0."""
    x, dy = np.random.default_rng(0).normal(size=(2, 64, 3))
    dxs = []
    for factor in 1.0, 2.0**exponent:
        layer = SyncBatchNorm(in_channels=3, epsilon=0)
        layer.cast("float64")
        layer.initialize()
        array = nd.array(x * factor, dtype="float64")
        array.attach_grad()
        with autograd.record():
            y = layer(array)
        y.backward(nd.array(dy, dtype="float64"))
        dxs.append(array.grad.asnumpy() * factor)
    np.testing.assert_array_equal(*dxs)


@pytest.mark.parametrize("train_mode", [True, False])
def test_gradients_where_y_overflows(train_mode):
    """A large slope makes y infinite in float16 although x_hat is small."""
    x, dy = np.random.default_rng(0).normal(size=(2, 64, 3)).astype("float16")
    results = []
    for dtype in "float64", "float16":
        layer = SyncBatchNorm(in_channels=3, activation="leaky_relu", slope=1e5)
        layer.cast(dtype)
        layer.initialize()
        array = nd.array(x, dtype=dtype)
        array.attach_grad()
        with autograd.record(train_mode):
            y = layer(array)
        y.backward(nd.array(dy / 1e5, dtype=dtype))
        results.append([array.grad.asnumpy(), layer.gamma.grad().asnumpy()])
    (dx, dgamma), (dx16, dgamma16) = results
    # dy / 1e5 is rounded to a subnormal float16, by 2**-25.
    assert np.abs(dx16 - dx).max() < 4 * 1e5 * 2.0**-25 + 2.0**-10 * np.abs(dx).max()
    assert np.isfinite(dgamma16).all() and np.abs(dgamma16 - dgamma).max() < 1


def test_gradients_with_a_large_beta():
    """Backward must not reconstruct x from y, whose rounding errors are large."""
    x, dy = np.random.default_rng(0).normal(size=(2, 64, 3)).astype("float16")
    results = []
    for activation in None, "identity":
        beta = mx.init.Constant(700)
        layer = SyncBatchNorm(
            in_channels=3, activation=activation, beta_initializer=beta
        )
        layer.cast("float16")
        layer.initialize()
        array = nd.array(x, dtype="float16")
        array.attach_grad()
        with autograd.record():
            y = layer(array)
        y.backward(nd.array(dy, dtype="float16"))
        results.append([array.grad.asnumpy(), layer.gamma.grad().asnumpy()])
    for kept, reconstructed in zip(*results):
        np.testing.assert_array_equal(kept, reconstructed)


def test_infinities_in_inference():
    """If x < 0, a ReLU replaces infinite x and dy by 0. A leaky ReLU keeps them."""
    x = nd.array(np.array([[-np.inf, np.inf, np.nan, -1]], "float32").T)
    for function, of_minus_infinity in ("relu", 0), ("leaky_relu", -np.inf):
        layer = SyncBatchNorm(num_devices=1, activation=function)
        layer.initialize()
        x.attach_grad()
        with autograd.record(train_mode=False):
            y = layer(x)
        y.backward(nd.array(np.array([[1, 1, 1, np.inf]]).T))
        expected = [of_minus_infinity, np.inf, np.nan]
        np.testing.assert_array_equal(y.asnumpy()[:3, 0], expected)
        expected_dx = 0 if function == "relu" else np.inf
        assert x.grad.asnumpy()[3, 0] == expected_dx


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


@pytest.mark.parametrize("axis", [4, -5])
def test_axis_outside_of_the_input(axis):
    layer = SyncBatchNorm(axis=axis, in_channels=3)
    layer.initialize()
    text = rf"'{layer.name}'(?=.*\b4\b).*axis.*{axis}\b"
    with autograd.train_mode(), pytest.raises(ValueError, match=text):
        layer(nd.array(X))


@pytest.mark.parametrize(
    "dtype, dtype_of_gamma, facts",
    [
        ("float32", "float16", ["float32 or float64", "cast"]),
        ("int32", "float32", ["int32"]),
    ],
)
def test_dtypes_that_the_layer_does_not_take(dtype, dtype_of_gamma, facts):
    layer = SyncBatchNorm(in_channels=3)
    layer.initialize()
    layer.gamma.cast(dtype_of_gamma)
    with autograd.train_mode(), pytest.raises(mx.MXNetError) as caught:
        layer(nd.array(X, dtype=dtype)).wait_to_read()
    assert all(fact in str(caught.value) for fact in [f"'{layer.name}'", *facts])
