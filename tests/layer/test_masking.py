"""Masks: the layer computes on the valid elements alone, whatever padding contains."""

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, make_parallel

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from support import reference
from support.blocks import Function, by_gluon, gluon_1_only
from support.helpers import (
    MODES,
    assert_all_near,
    put,
    set_mode,
    split_rows,
    summed_grad,
    train_step,
    value,
)
from support.nd import nd

LAYOUTS = {  # the data's shape, and the axis of its channels
    "NC": ((6, 3), 1),
    "NCT": ((6, 3, 5), 1),
    "NTC": ((6, 5, 3), 2),  # the last axis by its number
    "NTNC": ((6, 2, 2, 3), -1),
    "NCHW": ((6, 3, 4, 5), 1),
}
ROWS = [2, 4]  # one number for each device
COUNT = 100  # elements of a channel, for tolerances
GAMMA, BETA = np.array([1.5, -0.5, 1.0]), np.array([0.25, 0.0, -1.0])


def problem(layout, second_has_rows=True, seed=0):
    """Return x and dy with padding that must not matter, and the mask."""
    shape, axis = LAYOUTS[layout]
    rng = np.random.default_rng(seed)
    x, dy = rng.normal(2, 3, shape), rng.normal(size=shape)
    mask = (
        rng.random([size for i, size in enumerate(shape) if i != axis % len(shape)])
        < 0.6
    )
    mask[0] = True
    if not second_has_rows:
        mask[ROWS[0] :] = False
    of_padding = np.broadcast_to(~np.expand_dims(mask, axis), shape)
    x[of_padding], dy[of_padding] = np.nan, 7
    return x, dy, mask


def rows_of(array, mask, layout):
    """Return the valid elements as (elements, channels), and the padding."""
    array = np.moveaxis(array, LAYOUTS[layout][1], -1)
    return array[mask], array[~mask]


def make_layer(devices, layout, dtype="float64", **arguments):
    axis = LAYOUTS[layout][1]
    arguments.update(axis=axis, in_channels=3)
    layer = SyncBatchNorm(num_devices=len(devices), **arguments)
    layer.cast(dtype)
    layer.initialize(ctx=devices.contexts)
    layer.gamma.set_data(nd.array(GAMMA))
    layer.beta.set_data(nd.array(BETA))
    return layer


def train(devices, layer, x, dy, mask, dtype="float64"):
    """Return y and dx of a recorded step on all devices."""
    xs, dys, masks = (
        put(split_rows(v, ROWS), devices.contexts, dtype) for v in (x, dy, mask)
    )
    of_context = dict(zip(devices.contexts, masks))
    results = train_step(devices, lambda x: layer(x, of_context[x.context]), xs, dys)
    return map(np.concatenate, results)


def assert_valid(array, mask, layout, expected, dtype="float64"):
    """Check the valid elements; padding must be 0."""
    valid, padding = rows_of(array, mask, layout)
    assert_all_near([valid], [expected], dtype, COUNT, 10)
    assert not padding.any()


CASES = [  # layout, dtype, whether the second device has valid rows
    *((layout, "float64", True) for layout in LAYOUTS),
    ("NTC", "float64", False),
    ("NCT", "float32", True),
    ("NCT", "float16", True),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout, dtype, second_has_rows", CASES)
def test_padding_does_not_count(layout, dtype, second_has_rows, mode, devices):
    x, dy, mask = problem(layout, second_has_rows)
    activation = "identity"
    if dtype == "float16":
        activation = None  # "identity" would reconstruct x_hat from a rounded y
    layer = set_mode(make_layer(devices, layout, dtype, activation=activation), mode)
    y, dx = train(devices, layer, x, dy, mask, dtype)
    rows, head = (rows_of(v.astype(dtype), mask, layout)[0] for v in (x, dy))
    expected, mean, var, _ = reference.forward(rows, GAMMA, BETA)
    assert_valid(y, mask, layout, expected, dtype)
    expected, dgamma, dbeta = reference.backward(rows, head, GAMMA)
    assert_valid(dx, mask, layout, expected, dtype)
    if dtype != "float64":
        return
    mx.nd.waitall()
    found = [summed_grad(p) for p in (layer.gamma, layer.beta)]
    right = [dgamma, dbeta]
    for i in range(len(devices)):
        found += [value(p, i) for p in (layer.running_mean, layer.running_var)]
        right += [0.1 * mean, 0.9 + 0.1 * var]
    assert_all_near(found, right, "float64", COUNT, 10)


def test_running_statistics_with_a_mask(devices):
    """A frozen layer trains its gamma and beta only; its axis is named by number."""
    x, dy, mask = problem("NTC")
    layer = make_layer(devices, "NTC", use_global_stats=True)
    layer.running_mean.set_data(nd.array([1, 2, 3]))
    rows, head = (rows_of(v, mask, "NTC")[0] for v in (x, dy))
    statistics = [1, 2, 3], [1, 1, 1]
    expected = reference.inference_forward(rows, GAMMA, BETA, *statistics)
    y, dx = train(devices, layer, x, dy, mask)
    assert_valid(y, mask, "NTC", expected)
    expected, *right = reference.inference_backward(rows, head, GAMMA, *statistics)
    assert_valid(dx, mask, "NTC", expected)
    found = [summed_grad(p) for p in (layer.gamma, layer.beta)]
    assert_all_near(found, right, "float64", COUNT, 10)


class Masked(Function):
    def __init__(self, axis):
        super().__init__()
        self.norm = SyncBatchNorm(axis=axis, in_channels=3)

    def compute(self, F, x, mask):
        return self.norm(F.identity(x), mask)


@pytest.mark.parametrize("mode", MODES)
def test_parallel_nets_pass_masks_on(mode, devices):
    """Two contexts, the second with padding only, give what one context gives."""
    rng = np.random.default_rng(0)
    x, mask = rng.normal(size=(4, 5, 3)), np.zeros((4, 5))
    mask[0], mask[1, :3] = 1, 1
    found = []
    for contexts in devices.contexts, devices.contexts[:1]:
        net = Masked(-1)
        net.cast("float64")
        net.initialize(ctx=contexts)
        parallel = set_mode(make_parallel(net, ctx=contexts), mode)
        arguments = [nd.array(v, dtype="float64") for v in (x, mask)]
        arguments[0].attach_grad()
        with autograd.record():
            loss = (parallel(*arguments) ** 3).sum()
        loss.backward()
        gradients = arguments[0].grad.asnumpy(), summed_grad(net.norm.gamma)
        found.append([loss.asnumpy(), *gradients])
    assert_all_near(*found, "float64", COUNT, 10)


def test_numpy_arrays():
    x, _, mask = problem("NCT")
    layer = SyncBatchNorm(num_devices=1)
    layer.cast("float64")
    layer.initialize()
    with mx.util.np_shape(True), mx.util.np_array(True), autograd.train_mode():
        y = layer(mx.np.array(x, dtype="float64"), mx.np.array(mask, dtype=bool))
        assert isinstance(y, mx.np.ndarray)
    rows, _ = rows_of(x, mask, "NCT")
    expected = reference.forward(rows, np.ones(3), np.zeros(3))[0]
    assert_valid(y.asnumpy(), mask, "NCT", expected)


@pytest.mark.parametrize(
    "axis, mask, error, text",
    [
        (1, [[1, 0]], TypeError, r"mask .*NDArray.*\[\[1, 0\]\]"),
        (1, nd.ones((2, 3)), ValueError, r"mask .*\(2, 4\).*\(2, 3\)"),
        (-2, nd.ones((2, 4)), ValueError, "axis .*1 .*-2"),
        (0, nd.ones((3, 4)), ValueError, "axis .*1 .*0"),
        (1, mx.sym.var("mask"), TypeError, by_gluon("mask .*NDArray", "type")),
    ],
)
def test_a_mask_that_does_not_fit(axis, mask, error, text):
    layer = SyncBatchNorm(num_devices=1, axis=axis)
    layer.initialize()
    with pytest.raises(error, match=text):
        layer(nd.ones((2, 3, 4)), mask)


@pytest.mark.parametrize("shape", [(5, 6), (6, 5, 1), (6, 1, 5), (30,), (6, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_shapes_of_masks_in_every_mode(mode, shape, devices):
    """Transposed, as SequenceMask makes it, or with a third axis, which broadcasts."""
    x, net = nd.random.normal(shape=(6, 5, 3)), set_mode(Masked(-1), mode)
    make_parallel(net, devices.contexts).initialize()
    refused = pytest.raises((ValueError, mx.MXNetError), match="shape|nput|mask")
    for _ in range(2):
        with refused, autograd.record():
            net(x, nd.ones(shape)).wait_to_read()
        gluon_syncbn.recover()
        with autograd.record():  # now it has a graph
            net(x, nd.ones((6, 5))).wait_to_read()


@gluon_1_only("blocks take no symbols")
def test_a_symbol_with_a_mask():
    """Its shapes are unknown before it runs."""
    inputs = mx.sym.var("data"), mx.sym.var("mask")
    net = mx.gluon.SymbolBlock(Masked(-1)(*inputs), inputs)
    net.initialize(mx.init.One())
    x = nd.random.normal(shape=(6, 5, 3))
    for _ in range(2):
        assert net(x, nd.ones((6, 5))).shape == x.shape
        with pytest.raises(mx.MXNetError, match="mask"):
            net(x, nd.ones((5, 6))).wait_to_read()
