"""All ways to call a layer: gradient requests, training, prediction, graphs, dtypes.

Each test changes one way of calling and compares with the oracle, or with nn.BatchNorm
on one context; test_batch_norm.py has the table of data.
"""

import copy
import json

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
    run_step,
    set_mode,
    split_rows,
    summed_grad,
    train_step,
    value,
    whole,
)

from gluon_syncbn import SyncBatchNorm

SHAPE = (6, 3, 4, 5)
COUNT = 6 * 4 * 5
ONES, ZEROS = np.ones(3), np.zeros(3)


def batch(seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(2, 3, SHAPE), rng.normal(size=SHAPE))


def shards_of(array, devices, rows=(2, 4)):
    return put(split_rows(array, rows), devices.contexts, "float64")


def make_layer(devices, **arguments):
    layer = SyncBatchNorm(num_devices=len(devices), **arguments)
    layer.cast("float64")
    layer.initialize(ctx=devices.contexts)
    return layer


def train_batch(devices, layer):
    """Trains on `batch()` for a step; returns x, dy, and the whole y and dx."""
    x, dy = batch()
    ys, dxs = train_step(devices, layer, shards_of(x, devices), shards_of(dy, devices))
    return x, dy, np.concatenate(ys), np.concatenate(dxs)


def whole_grad(shards):
    return whole([shard.grad for shard in shards])


def assert_close(result, expected):
    """Compares float64 results of float64 data, whose terms are of order 10."""
    scale = 10 * abs(np.asarray(expected)).max() + 10
    assert_near(result, expected, "float64", COUNT, scale=scale)


@pytest.mark.parametrize(
    "x_request, gamma_request, beta_request",
    [
        ("write", "write", "write"),
        ("add", "add", "add"),
        ("write", "null", "add"),
        ("add", "write", "null"),
        ("null", "add", "write"),
        ("null", "null", "write"),
        ("write", "null", "null"),
    ],
)
@pytest.mark.parametrize("mode", ["imperative", "hybridize", "static_shape"])
def test_gradient_requests(mode, x_request, gamma_request, beta_request, devices):
    layer = make_layer(devices)
    layer.gamma.grad_req, layer.beta.grad_req = gamma_request, beta_request
    set_mode(layer, mode)
    x, dy = batch()
    shards, dys = shards_of(x, devices), shards_of(dy, devices)
    if x_request != "null":
        for shard in shards:
            shard.attach_grad(x_request)
    for _ in range(2):
        run_step(devices, layer, shards, dys)
    dx, dgamma, dbeta = reference.backward(x, dy, ONES)
    times = {"write": 1, "add": 2, "null": 0}
    if x_request != "null":
        assert_close(whole_grad(shards), times[x_request] * dx)
    if gamma_request != "null":
        assert_close(summed_grad(layer.gamma), times[gamma_request] * dgamma)
    if beta_request != "null":
        assert_close(summed_grad(layer.beta), times[beta_request] * dbeta)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(6, 3, 20), (6, 3, 4, 5), (6, 3, 2, 2, 5)], ids=len)
def test_gradient_of_a_nets_input_is_added(shape, mode, devices):
    net = nn.HybridSequential()
    net.add(SyncBatchNorm(num_devices=2), nn.HybridLambda(lambda F, x: 2 * x))
    net.initialize(ctx=devices.contexts)
    set_mode(net, mode)
    x, dy = (v.reshape(shape).astype("float32") for v in batch())
    shards, dys = (put(split_rows(v, (2, 4)), devices.contexts) for v in (x, dy))
    for shard in shards:
        shard.attach_grad("add")
    for _ in range(2):
        run_step(devices, net, shards, dys)
    dx = reference.backward(x, dy, ONES)[0]
    assert_near(whole_grad(shards), 4 * dx, count=COUNT, scale=4 * abs(dy).max())


def inference(layer, x):
    running = value(layer.running_mean), value(layer.running_var)
    return reference.inference_forward(x, ONES, ZEROS, *running)


@pytest.mark.parametrize("mode", ["imperative", "static_shape"])
def test_recording_in_prediction_mode(mode, devices):
    layer = set_mode(make_layer(devices), mode)
    x, dy, _, _ = train_batch(devices, layer)
    running = value(layer.running_mean), value(layer.running_var)
    shards = shards_of(x, devices)
    for shard in shards:
        shard.attach_grad()
    with autograd.record(train_mode=False):
        ys = devices.map(layer, shards)
    autograd.backward(ys, shards_of(dy, devices), train_mode=False)
    assert_close(whole(ys), inference(layer, x))
    dx, dgamma, dbeta = reference.inference_backward(x, dy, ONES, *running)
    assert_close(whole_grad(shards), dx)
    assert_close(summed_grad(layer.gamma), dgamma)
    assert_close(summed_grad(layer.beta), dbeta)
    np.testing.assert_array_equal(value(layer.running_mean), running[0])


@pytest.mark.parametrize("mode", ["imperative", "hybridize", "static_shape"])
def test_training_mode_without_recording(mode, devices):
    layer = set_mode(make_layer(devices), mode)
    x, _ = batch()
    with autograd.train_mode():
        ys = devices.map(layer, shards_of(x, devices))
    expected, mean, _, _ = reference.forward(x, ONES, ZEROS)
    assert_close(whole(ys), expected)
    assert_close(value(layer.running_mean, 1), 0.1 * mean)


def test_prediction_needs_no_other_device(devices):
    layer = make_layer(devices)
    x, _ = batch()
    alone = mx.nd.array(x, ctx=devices.contexts[1], dtype="float64")
    assert_close(layer(alone).asnumpy(), inference(layer, x))
    with autograd.record(), autograd.predict_mode():
        assert_close(layer(alone).asnumpy(), inference(layer, x))


@pytest.mark.parametrize("mode", MODES)
def test_global_statistics_in_training(mode, devices):
    layer = make_layer(devices, use_global_stats=True, in_channels=3)
    layer.running_mean.set_data(mx.nd.array([1, 2, 3], dtype="float64"))
    running = value(layer.running_mean), value(layer.running_var)
    x, dy, y, dx = train_batch(devices, set_mode(layer, mode))
    assert_close(y, inference(layer, x))
    assert_close(dx, reference.inference_backward(x, dy, ONES, *running)[0])
    np.testing.assert_array_equal(value(layer.running_mean), running[0])


def test_without_scale_gamma_counts_as_one(devices):
    layer = make_layer(devices, scale=False, in_channels=3, gamma_initializer="zeros")
    x, dy, y, dx = train_batch(devices, layer)
    assert_close(y, reference.forward(x, ONES, ZEROS)[0])
    assert_close(dx, reference.backward(x, dy, ONES)[0])
    assert layer.gamma.grad_req == "null"


def test_without_center_beta_stays_as_initialized(devices):
    layer = make_layer(devices, center=False, beta_initializer="ones")
    x, _, y, _ = train_batch(devices, layer)
    assert_close(y, reference.forward(x, ONES, ONES)[0])
    assert layer.beta.grad_req == "null"


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.7, 1.0, None])
def test_running_statistics(momentum, unbiased, count, make_devices):
    devices = make_devices(count)
    layer = make_layer(devices, momentum=momentum, unbiased_running_var=unbiased)
    mean, var = np.zeros(3), np.ones(3)
    for step in range(1, 5):
        x, _ = batch(step)
        with autograd.train_mode():
            devices.map(layer, shards_of(x, devices, (6,) if count == 1 else (2, 4)))
        _, batch_mean, batch_var, _ = reference.forward(x, ONES, ZEROS)
        mean = reference.update_running(mean, batch_mean, momentum, step=step)
        var = reference.update_running(
            var, batch_var, momentum, unbiased, COUNT, step=step
        )
    assert_close(value(layer.running_mean), mean)
    assert_close(value(layer.running_var), var)
    assert layer.num_batches_tracked == 4


def test_number_of_batches_can_be_restored(devices):
    layer = make_layer(devices, momentum=None, in_channels=3)
    layer.num_batches_tracked = 3
    x, _ = batch()
    with autograd.train_mode():
        devices.map(layer, shards_of(x, devices))
    mean = reference.forward(x, ONES, ZEROS)[1]
    assert_close(value(layer.running_mean), mean / 4)
    assert layer.num_batches_tracked == 4


@pytest.mark.parametrize("mode", MODES)
def test_numpy_arrays(mode, devices):
    layer = set_mode(make_layer(devices), mode)
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
        assert_close(whole_grad(shards), reference.backward(x, dy, ONES)[0])


@pytest.mark.parametrize("mode", MODES)
def test_backward_twice_through_one_forward(mode, devices):
    layer = make_layer(devices)
    layer.gamma.grad_req = "add"
    set_mode(layer, mode)
    x, dy = batch()
    shards, dys = shards_of(x, devices), shards_of(dy, devices)
    for shard in shards:
        shard.attach_grad("add")
    with autograd.record():
        ys = devices.map(layer, shards)
    devices.map(lambda y, head: y.backward(head, retain_graph=True), ys, dys)
    devices.map(lambda y, head: y.backward(2 * head), ys, dys)
    dx, dgamma, _ = reference.backward(x, dy, ONES)
    assert_close(whole_grad(shards), 3 * dx)
    assert_close(summed_grad(layer.gamma), 3 * dgamma)


def test_cast_to_float16_keeps_parameters_in_float32(devices):
    net = nn.HybridSequential()  # of layers that MXNet has in float16 on a CPU
    net.add(SyncBatchNorm(num_devices=2), nn.Activation("relu"), nn.MaxPool2D(2))
    net.cast("float16")
    net.initialize(ctx=devices.contexts)
    x = batch()[0].astype("float16")
    shards = put(split_rows(x, [2, 4]), devices.contexts, "float16")
    with autograd.train_mode():
        ys = devices.map(net[0], shards)
        outputs = devices.map(net[1:], ys)
    assert {y.dtype for y in ys + outputs} == {np.float16}
    assert {p.dtype for p in net.collect_params().values()} == {"float32"}
    expected = reference.forward(x, ONES, ZEROS)[0]
    assert_near(whole(ys), expected, "float16", COUNT, scale=abs(expected).max())


@pytest.mark.parametrize("initialized", [False, True])
def test_deepcopy_has_a_group_of_its_own(initialized, devices):
    layer = SyncBatchNorm(num_devices=2, in_channels=3)
    if initialized:
        layer.initialize(ctx=devices.contexts)
    twin = copy.deepcopy(layer)
    twin.initialize(ctx=devices.contexts, force_reinit=True)
    layer.initialize(ctx=devices.contexts, force_reinit=True)
    x, _ = batch()
    shards = put(split_rows(x, [2, 4]), devices.contexts)
    with autograd.train_mode():
        ys = devices.map(lambda shard: twin(layer(shard)), shards)
    assert np.isfinite(ys[1].asnumpy()).all()
    assert layer.num_batches_tracked == twin.num_batches_tracked == 1


def assert_normalizes(layer, devices, rows):
    x, _ = batch()
    with autograd.train_mode():
        ys = devices.map(layer, put(split_rows(x, rows), devices.contexts))
    expected = reference.forward(x.astype("float32"), ONES, ZEROS)[0]
    assert_near(whole(ys), expected, scale=10)


def test_number_of_devices_is_that_of_the_initialization(make_devices):
    devices = make_devices(3)
    layer = SyncBatchNorm()
    assert layer.num_devices is None
    layer.initialize(ctx=devices.contexts)
    assert layer.num_devices == 3
    assert_normalizes(layer, devices, [2, 2, 2])


def test_statistics_of_more_contexts_than_shards(devices):
    """Two of three contexts hold shards, as num_devices says."""
    layer = SyncBatchNorm(num_devices=2)
    layer.initialize(ctx=cpus(3))
    assert_normalizes(layer, devices, [2, 4])


def test_symbol_made_by_hand_is_guarded_for_every_mode():
    """Outside of Gluon's trace a layer cannot know what it will be a part of."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), SyncBatchNorm(num_devices=1), nn.Conv2D(4, 3))
    nodes = json.loads(net(mx.sym.var("data")).tojson())["nodes"]
    (node,) = (node for node in nodes if node["op"] == "Custom")
    assert node["attrs"]["guard"] == "any"
