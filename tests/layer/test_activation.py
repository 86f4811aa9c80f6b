"""The built-in activation: in MXNet as in the oracle, whatever gamma is."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support import reference
from support.helpers import (
    MODES,
    assert_near,
    put,
    set_mode,
    split_rows,
    summed_grad,
    train_step,
)

from gluon_syncbn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm

SHAPE, ROWS = (5, 8, 6, 7), [3, 2]
RNG = np.random.default_rng(11)
GAMMA = np.array([1, -0.7, 0, 1e-12, -1e-3, 0.05, 2, -1e-42], "float32")
BETA = np.array([0.5, -1, 0.3, 0.2, 0, -0.6, 0, 0], "float32")
KINDS = [("identity", None), ("relu", None), ("leaky_relu", 0.1), ("elu", 0.8)]


def make_data(dtype, function, slope):
    """x, dy and dz = dL/dz; dy is 0 where rounding may choose the side of the kink."""
    x, dy = RNG.normal(1, 2, (2, *SHAPE)).astype(dtype).astype("float64")
    z = reference.forward(x, GAMMA, BETA)[0]
    if function != "identity":
        dy[abs(z) < 1e-5 * abs(z).max()] = 0
    dy = dy.astype(dtype)
    return x, dy, dy * reference.activation_gradient(z, function, slope), z


def set_parameters(layer):
    layer.gamma.set_data(mx.nd.array(GAMMA, dtype="float32"))
    layer.beta.set_data(mx.nd.array(BETA, dtype="float32"))


def wrap(layer, inside):
    """The layer alone, or as an inner node of a graph."""
    if not inside:
        return layer
    net = nn.HybridSequential()
    net.add(nn.HybridLambda("identity"), layer, nn.HybridLambda("identity"))
    return net


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("function, slope", KINDS)
def test_equals_the_oracle(function, slope, mode, inside, dtype, devices):
    layer = SyncBatchNorm(
        in_channels=8, num_devices=2, activation=function, slope=slope
    )
    net = wrap(layer, inside)
    net.cast(dtype)
    net.initialize(ctx=devices.contexts)
    set_parameters(layer)
    set_mode(net, mode)
    slope = slope or 0.0
    x, dy, dz, z = make_data(dtype, function, slope)
    shards, dys = (put(split_rows(v, ROWS), devices.contexts, dtype) for v in (x, dy))
    for _ in range(3):  # static graphs reuse their memory
        ys, dxs = train_step(devices, net, shards, dys)

    x_hat, _, _, inv_std = reference.forward(x, np.ones(8), np.zeros(8))
    dx, dgamma, dbeta = reference.backward(x, dz, GAMMA)
    of_x_hat = reference.reconstruction_error(dtype, function, abs(x_hat).max())
    near = {"count": x.size // 8}
    scale = abs(GAMMA).max() * abs(x_hat).max() + abs(BETA).max()
    y = reference.activate(z, function, slope)
    assert_near(np.concatenate(ys), y, dtype, scale=scale, **near)
    scale = abs(GAMMA * inv_std).max() * abs(dz).max() * (1 + abs(x_hat).max())
    rtol, atol = reference.tolerance(dtype, scale=scale, **near)
    np.testing.assert_allclose(
        np.concatenate(dxs), dx, rtol, atol + 2 * of_x_hat * scale
    )
    kind = "float64" if dtype == "float64" else "float32"
    scale = abs(dz).sum((0, 2, 3)).max() * (1 + abs(x_hat).max())
    rtol, atol = reference.tolerance(kind, scale=scale, **near)
    for parameter, expected in (layer.gamma, dgamma), (layer.beta, dbeta):
        result = summed_grad(parameter)
        np.testing.assert_allclose(result, expected, rtol, atol + of_x_hat * scale)


@pytest.mark.parametrize("function, slope", KINDS)
def test_inference_and_its_gradient(function, slope):
    layer = SyncBatchNorm(
        in_channels=8, num_devices=1, activation=function, slope=slope
    )
    layer.initialize()
    set_parameters(layer)
    mean, var = RNG.normal(size=8), RNG.uniform(0.5, 2, 8)
    layer.running_mean.set_data(mx.nd.array(mean))
    layer.running_var.set_data(mx.nd.array(var))
    mean, var = (p.data().asnumpy() for p in (layer.running_mean, layer.running_var))
    x = mx.nd.array(RNG.normal(size=SHAPE), dtype="float32")
    x.attach_grad()
    with autograd.record(train_mode=False):
        y = layer(x)
    y.backward()
    z = reference.inference_forward(x.asnumpy(), GAMMA, BETA, mean, var)
    slope = slope or 0.0
    expected = reference.activate(z, function, slope)
    assert_near(y.asnumpy(), expected, scale=abs(z).max() + 2)
    dz = reference.activation_gradient(z, function, slope)
    dz[abs(z) < 1e-5] = np.nan  # either side of the kink
    dx, _, _ = reference.inference_backward(x.asnumpy(), dz, GAMMA, mean, var)
    known = np.isfinite(dz)
    assert known.mean() > 0.8
    assert_near(x.grad.asnumpy()[known], dx[known], scale=abs(dx[known]).max())


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


def test_slopes_of_default():
    assert "slope=0.01" in repr(SyncBatchNorm(activation="leaky_relu"))
    assert "activation='elu', slope=1.0" in repr(SyncBatchNorm(activation="elu"))
    assert SyncBatchNorm().activation is None


@pytest.mark.parametrize("function, slope", KINDS)
def test_reverted_layer_computes_the_same(function, slope):
    layer = SyncBatchNorm(num_devices=1, activation=function, slope=slope)
    layer.initialize()
    x = mx.nd.array(RNG.normal(size=SHAPE))
    y, text = layer(x).asnumpy(), repr(layer)
    assert revert_sync_batchnorm(layer) is layer
    assert isinstance(layer, nn.BatchNorm) and not isinstance(layer, SyncBatchNorm)
    np.testing.assert_allclose(layer(x).asnumpy(), y, 1e-5, 1e-5)
    assert repr(convert_sync_batchnorm(layer, 1)) == text
    np.testing.assert_array_equal(layer(x).asnumpy(), y)
