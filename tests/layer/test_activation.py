"""The built-in activation: infinities, slopes, and the way back to MXNet's blocks.

Random programs compare it with the oracle, whatever gamma is.
"""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

from gluon_syncbn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm

SHAPE = 5, 8, 6, 7
RNG = np.random.default_rng(11)
KINDS = [("identity", None), ("relu", None), ("leaky_relu", 0.1), ("elu", 0.8)]


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
