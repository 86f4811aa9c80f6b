"""The native operator takes arrays in any layout, as Custom does without it."""

import functools
import os

import gluon_syncbn
from gluon_syncbn.layer import native_operator as native
from gluon_syncbn.native.library import load

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn
from support import reference
from support.blocks import gluon_1_only
from support.helpers import (
    MODES,
    assert_all_near,
    output_of,
    ready,
    set_mode,
    step_of_layer,
)
from support.nd import nd

pytestmark = [
    gluon_1_only("it has no native operator"),
    # Some functions below leave out a convolution or an input.
    pytest.mark.filterwarnings("ignore:.*is not used by any computation"),
]

# Convolutions do not use oneDNN without this, so all arrays are row-major.
HAS_BLOCKS = os.environ.get("MXNET_MKLDNN_ENABLED") != "0"


class Net(HybridBlock):
    """A function of a layer and of convolutions around it."""

    def __init__(self, function, norm, channels):
        super().__init__()
        self.function, self.norm = function, norm
        options = {"kernel_size": 3, "padding": 1, "use_bias": False}
        self.before = nn.Conv2D(channels, in_channels=16, **options)
        self.after = nn.Conv2D(16, in_channels=channels, **options)

    def hybrid_forward(self, F, x):
        return self.function(F, self, x)


def twice(F, net, x):
    """Return outputs for which dy is a sum of parts with two layouts."""
    y = net.norm(net.before(x))
    return F.broadcast_add(net.after(y), F.mean(y, keepdims=True))


FUNCTIONS = {
    "between": lambda F, net, x: net.after(net.norm(net.before(x))),
    "plain gradient": lambda F, net, x: net.norm(net.before(x)) * 3,
    "plain input": lambda F, net, x: net.after(net.norm(F.sin(net.before(x)))),
    "part": lambda F, net, x: net.norm(
        F.slice_axis(net.before(x), axis=0, begin=1, end=3)
    ),
    "other shape": lambda F, net, x: net.norm(
        F.reshape(net.before(x), shape=(0, 0, -1))
    ),
    "twice": twice,
}


def results(function, norm, mode, dtype="float32", channels=16):
    """Return outputs, gradients and parameters of two steps with grad_req "add"."""
    rng = np.random.default_rng(0)
    net = ready(Net(FUNCTIONS[function], norm(in_channels=channels), channels))
    set_mode(net, mode).cast(dtype)
    x = nd.array(rng.normal(1, 2, (4, 16, 7, 9)), dtype=dtype)
    parameters = net.collect_params().values()
    trained = [p for p in parameters if p.grad_req != "null"]
    for parameter in trained:
        fan_in = np.sqrt(np.prod(parameter.shape[1:]))
        drawn = rng.uniform(0.5, 1.5, parameter.shape) / fan_in
        parameter.set_data(nd.array(drawn, dtype=parameter.dtype))
    x.attach_grad("add")
    found = []
    for _ in range(2):
        with autograd.record():
            y = net(x)
        found.append(y.asnumpy())
        y.backward(nd.array(rng.normal(size=y.shape), dtype=dtype))
    mx.nd.waitall()
    arrays = [x.grad, *(p.grad() for p in trained), *(p.data() for p in parameters)]
    return found + [array.asnumpy() for array in arrays]


def assert_like_batch_norm(function, mode, activation=None, **options):
    norm = functools.partial(nn.BatchNorm, momentum=0.875)  # exact in float32
    right = results(function, norm, mode, "float64", **options)
    rounded = results(function, norm, mode, **options)
    ours = {"num_devices": 1, "momentum": 0.875, "activation": activation}
    ours = functools.partial(gluon_syncbn.SyncBatchNorm, **ours)
    found = results(function, ours, mode, **options)
    assert len(found) == len(right) == len(rounded)
    for value, expected, other in zip(found, right, rounded):
        rtol, atol = reference.tolerance("float32", 200, scale=abs(expected).max())
        # MXNet's own float32 run measures the rounding of the convolutions.
        atol += 10 * abs(other - expected).max()
        np.testing.assert_allclose(value, expected, rtol, atol)


@pytest.mark.parametrize("activation", [None, "identity"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_neighbours_in_blocked_layouts(function, mode, activation):
    is_counted = function == "between" and HAS_BLOCKS and native.is_used()
    before = load().gluon_syncbn_blocked_calls()
    assert_like_batch_norm(function, mode, activation)
    if is_counted:  # y and dx of two steps
        assert load().gluon_syncbn_blocked_calls() - before == 4


@pytest.mark.parametrize("channels", [8, 24, 17, 3])
def test_channels(channels):
    assert_like_batch_norm("between", "hybridize", channels=channels)


# ---- Arrays that only an imperative program makes. Results in two layouts are equal up
# to the order of sums.


def blocked(seed, shape=(4, 16, 6, 6)):
    """Return an array that a convolution has written."""
    rng = np.random.default_rng(seed)
    x, weight = (
        nd.array(rng.normal(size=s)) for s in (shape, (shape[1],) * 2 + (1, 1))
    )
    options = {"kernel": (1, 1), "num_filter": shape[1], "no_bias": True}
    return nd.Convolution(x, weight, **options)


def blocked_weight():
    """Return a weight in the layout that a convolution has chosen in inference."""
    net = ready(nn.Conv2D(16, 3, in_channels=16, use_bias=False))
    net.weight.set_data(plain(blocked(3, (16, 16, 3, 3))))
    net(nd.ones((2, 16, 9, 9))).wait_to_read()
    return net.weight.data()


ARRAYS = {
    "blocked": lambda: blocked(1),
    "part": lambda: blocked(1)[1:3],
    "weight": blocked_weight,
    "view": lambda: blocked(1).reshape((4, 16, 4, 9)),
    "one axis less": lambda: blocked(1).reshape((0, 0, -1)),
}


def plain(array):
    return nd.array(array.asnumpy())


@pytest.mark.parametrize("axis", [1, -1, 0])
@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_in_any_layout(name, axis):
    make = ARRAYS[name]
    for dy in plain(make() * 2), blocked(2, make().shape) if make().ndim == 4 else None:
        right_dy = dy if dy is None else plain(dy)
        expected = step_of_layer(plain(make()), right_dy, axis=axis)
        found = step_of_layer(make(), dy, axis=axis)
        assert_all_near(found, expected, "float32", 600, scale=10)


@pytest.mark.parametrize("gradient", [blocked, lambda _: blocked_weight()])
def test_gradients_are_added_to_an_array_in_any_layout(gradient):
    if native.missing():
        pytest.skip("MXNet raises an error before Custom runs")
    layer = ready(gluon_syncbn.SyncBatchNorm(num_devices=1, in_channels=16))
    shape = gradient(4).shape
    x, dys = blocked(1, shape), [blocked(2, shape), plain(blocked(3, shape))]
    expected = gradient(4).asnumpy()
    autograd.mark_variables([x], [gradient(4)], ["add"])
    for dy in dys:
        expected = expected + step_of_layer(plain(x), plain(dy))[1]
        with autograd.record():
            y = layer(x)
        y.backward(dy)
    assert_all_near([x.grad.asnumpy()], [expected], "float32", 600, scale=10)


def test_a_copy_of_the_input_keeps_its_layout():
    """Backward reads a copy of x if gamma is 0, and y may have got another layout."""
    options = {"activation": "leaky_relu", "gamma_initializer": "zeros"}
    x, dy = blocked(1), blocked(2)
    expected = step_of_layer(plain(x), plain(dy), **options)
    found = step_of_layer(x, dy, reads_y=True, **options)
    assert_all_near(found, expected, "float32", 600, scale=10)


# ---- Sparse arrays, which become dense copies.


class Sparse(HybridBlock):
    def __init__(self, norm, has_product):
        super().__init__()
        self.norm, self.has_product = norm, has_product

    def hybrid_forward(self, F, x, matrix):
        y = self.norm(x)
        return F.dot(matrix, y) if self.has_product else F.identity(y)


@pytest.mark.parametrize("place", ["x", "gradient of x", "gradient of y", "product"])
@pytest.mark.parametrize("mode", MODES)
def test_sparse_neighbours(place, mode):
    if mode == "imperative" and place.endswith("x") and native.missing():
        pytest.skip("MXNet's Custom takes no sparse arrays")
    matrix = mx.nd.array([[1, 0, 2], [0, 0, 1.0]]).tostype("csr")
    found = []
    for stype in "default", "row_sparse":
        norm = gluon_syncbn.SyncBatchNorm(num_devices=1, in_channels=3)
        net = ready(set_mode(Sparse(norm, place == "product"), mode))
        x = mx.nd.array([[1, 2, 3], [4, 5, 7.0], [0, 0, 0]])
        x = x.tostype(stype) if place == "x" else x
        if place != "x":
            x.attach_grad(stype=stype if place == "gradient of x" else "default")
        with autograd.record():
            y = net(x, matrix)
        dy = mx.nd.arange(y.size).reshape(y.shape) ** 2
        y.backward(dy.tostype(stype) if place == "gradient of y" else dy)
        arrays = [y, norm.gamma.grad(), *([] if place == "x" else [x.grad])]
        found.append([array.asnumpy() for array in arrays])
    assert_all_near(*found, "float32", 10, scale=100)


# ---- Whether the operator is used.

OTHERS = """
import gluon_syncbn
import mxnet as mx
from mxnet import autograd
from mxnet.gluon import nn

class Twice(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0] * 2)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0] * 2)

@mx.operator.register('twice')
class TwiceProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Twice()

def twice(F, x):
    return F.Custom(x, op_type='twice')

x = mx.nd.array([[1.0], [3.0]])
for hybridize in False, True:
    layer = gluon_syncbn.SyncBatchNorm(num_devices=1, in_channels=1)
    net = nn.HybridSequential()
    net.add(nn.HybridLambda(twice), layer, nn.HybridLambda(twice))
    net.initialize()
    net.hybridize(hybridize)
    x.attach_grad()
    with autograd.record():
        y = net(x)
        z = y * x
    z.backward()
    print(y.asnumpy().ravel().round(3).tolist(), hasattr(mx.nd, '_gluon_syncbn'))
"""


def test_custom_operators_of_others_are_unchanged():
    assert output_of(OTHERS) == "[-2.0, 2.0] False\n" * 2


def test_the_native_operator_is_used_with_pips_mxnet():
    """Otherwise the tests above would compare Custom with itself."""
    has_onednn = mx.runtime.Features().is_enabled("MKLDNN")
    if mx.__version__ not in ("1.7.0", "1.8.0", "1.9.0", "1.9.1") or not has_onednn:
        pytest.skip("MXNet must be one of 1.7.0 to 1.9.1, with oneDNN")
    if {"GLUON_SYNCBN_NATIVE", "MXNET_ENGINE_TYPE"} & os.environ.keys():
        pytest.skip("the environment may switch the native operator off")
    assert native.missing() == ""


@pytest.mark.parametrize(
    "variables, reason",
    [
        ({"GLUON_SYNCBN_NATIVE": "0"}, "GLUON_SYNCBN_NATIVE=0 is set"),
        (
            {"MXNET_ENGINE_TYPE": "NaiveEngine", "GLUON_SYNCBN_NATIVE": "1"},
            "MXNET_ENGINE_TYPE=NaiveEngine is set",
        ),
    ],
)
def test_a_reason_is_given(variables, reason):
    code = "from gluon_syncbn.layer.native_operator import missing; print(missing())"
    assert output_of(code, **variables).strip() == reason
