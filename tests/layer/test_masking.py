"""Masks: the layer computes on the valid elements alone, whatever padding contains."""

from gluon_syncbn import Devices, SyncBatchNorm

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from support.helpers import (
    MODES,
    assert_all_near,
    cpus,
    put,
    ready,
    set_mode,
    split_rows,
    summed_grad,
    train_step,
    value,
)
from support.nd import nd
from support.nets import Net

LAYOUTS = {  # the data's shape, and the axis of its channels
    "NC": ((6, 3), 1),
    "NTC": ((6, 5, 3), 2),
    "NHWC": ((6, 2, 2, 3), -1),
    "NTCW": ((6, 5, 3, 2), -2),
    "NCHW": ((6, 3, 4, 5), 1),
}
ROWS = [2, 4]  # one number for each device
VALUES = {"gamma": [1.5, -0.5, 1], "beta": [0.25, 0, -1], "running_mean": [1, 2, 3]}
# The arguments dtype, count and scale of assert_all_near.
LIMITS = "float64", 100, 20


def problem(layout, pad_second_shard):
    """Return x and dy with padding that must not matter, and the mask."""
    shape, axis = LAYOUTS[layout]
    rng = np.random.default_rng(0)
    x, dy = rng.normal(2, 3, shape), rng.normal(size=shape)
    mask = rng.random(np.delete(shape, axis)) < 0.6
    mask[0] = True
    if pad_second_shard:
        mask[ROWS[0] :] = False
    is_padding = np.broadcast_to(~np.expand_dims(mask, axis), shape)
    x[is_padding], dy[is_padding] = np.nan, 7
    return x, dy, mask


def make_layer(contexts, **options):
    layer = SyncBatchNorm(in_channels=3, activation="identity", **options)
    layer.cast("float64")
    layer.initialize(ctx=contexts)
    for name, values in VALUES.items():
        getattr(layer, name).set_data(nd.array(values))
    return layer


def state_of(layer):
    mx.nd.waitall()
    gradients = [summed_grad(p) for p in (layer.gamma, layer.beta)]
    return gradients + [value(p, -1) for p in (layer.running_mean, layer.running_var)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "layout, pad_second_shard",
    [("NTC", True), *((layout, False) for layout in LAYOUTS)],
)
def test_equals_a_batch_of_the_valid_elements(
    layout, pad_second_shard, frozen, mode, devices
):
    x, dy, mask = problem(layout, pad_second_shard)
    axis, options = LAYOUTS[layout][1], {"use_global_stats": frozen}
    layer = set_mode(make_layer(devices.contexts, axis=axis, **options), mode)
    xs, dys, masks = (
        put(split_rows(v, ROWS), devices.contexts, "float64") for v in (x, dy, mask)
    )
    masks = dict(zip(devices.contexts, masks))
    found = train_step(devices, lambda x: layer(x, masks[x.context]), xs, dys)
    arrays = [np.moveaxis(np.concatenate(shards), axis, -1) for shards in found]
    one, plain = Devices(mx.cpu()), make_layer(cpus(1), **options)
    batch = [put([np.moveaxis(v, axis, -1)[mask]], cpus(1), "float64") for v in (x, dy)]
    expected = [shard for (shard,) in train_step(one, plain, *batch)]
    assert_all_near([array[mask] for array in arrays], expected, *LIMITS)
    assert not any(array[~mask].any() for array in arrays)
    assert_all_near(state_of(layer), state_of(plain), *LIMITS)


def test_numpy_arrays():
    layer = ready(SyncBatchNorm(num_devices=1, epsilon=0))
    with mx.util.np_shape(True), mx.util.np_array(True), autograd.train_mode():
        y = layer(mx.np.array([[1.0], [3], [9]]), mx.np.array([1, 1, 0], dtype=bool))
        assert isinstance(y, mx.np.ndarray)
    assert y.asnumpy().tolist() == [[-1], [1], [0]]


@pytest.mark.parametrize("shape", [(5, 6), (6, 1), (6, 5, 1)])
def test_masks_of_wrong_shapes_in_graphs(shape):
    """A mask (5, 6) has time on its first axis. The other shapes can be broadcast."""
    x = nd.random.normal(shape=(6, 5, 3))
    net = Net(function=lambda F, x, mask: net.norm(F.identity(x), mask))
    net.norm = SyncBatchNorm(axis=-1, in_channels=3)
    net.initialize()
    net.hybridize()
    for _ in range(2):
        with pytest.raises((ValueError, mx.MXNetError), match="shape|nput|mask"):
            net(x, nd.ones(shape)).wait_to_read()
        net(x, nd.ones((6, 5))).wait_to_read()  # now the net has a graph
