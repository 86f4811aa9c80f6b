"""GluonCV's detection and pose nets train hybridized like nn.BatchNorm on one device.

Their graphs have several inputs, parts that are SymbolBlocks, shapes that depend on the
number of images, and operators whose output jumps where proposals change places, which
rounding in float64 does not cause.
"""

import functools

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import Constant, Trainer
from support.helpers import Loop, cpus, put, set_mode, split_rows

from gluon_syncbn import (
    Devices,
    ParallelCriterion,
    allow_plain_loop,
    check_replicas,
    convert_sync_batchnorm,
    make_parallel,
)

nets = pytest.importorskip("support.detection_nets", reason="GluonCV is not installed")


@pytest.fixture(autouse=True)
def gluoncv_in_float64(monkeypatch):
    """GluonCV takes float64 for float32, and samples the same regions everywhere."""
    for module in mx.nd, mx.sym:
        arange = functools.partial(module.arange, dtype="float64")

        def uniform(low, high, shape, arange=arange):
            return arange(shape[0]) / shape[0]

        def cast(data, dtype, cast=module.cast):
            return cast(data, dtype="float64" if dtype == "float32" else dtype)

        monkeypatch.setattr(module, "arange", arange)
        monkeypatch.setattr(module.random, "uniform", uniform)
        monkeypatch.setattr(module, "cast", cast)
        # MXNet's operator does not know float64.
        monkeypatch.setattr(module, "amp_multicast", lambda *arrays, **_: arrays)


def make(name, rows, contexts):
    net, loss = getattr(nets, name)(rows)
    net.initialize(ctx=contexts, force_reinit=True)  # a part of it is
    net.cast("float64")
    return net, loss


def parameters_of(net):
    parameters = net.collect_params().values()
    return [p for p in parameters if not isinstance(p, Constant)]


def set_values(net, values):
    for parameter, array in zip(parameters_of(net), values):
        parameter.set_data(mx.nd.array(array, dtype="float64"))


def train(net, name, steps, step):
    """Losses of steps of SGD on so many images; `step` gives those of the shards."""
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 2e-3})
    found = []
    for rows in steps:
        totals = step([array[:rows] for array in nets.batch(name)])
        trainer.step(rows)
        found.append(sum(float(total.asscalar()) for total in totals))
    return np.array(found)


def on_devices(net, loss, devices):
    """The step of a loop over devices, which returns their losses."""

    def total(*shard):
        *inputs, weights = shard
        outputs = net(*inputs)
        parts = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        return (loss(*parts) * weights).sum()

    def step(batch):
        contexts = devices.contexts
        rows = [len(batch[0]) // len(contexts)] * len(contexts)
        shards = [put(split_rows(a, rows), contexts, "float64") for a in batch]
        with autograd.record():
            totals = devices.map(total, *shards)
        devices.map(lambda total: total.backward(), totals)
        return totals

    return step


@functools.lru_cache(maxsize=None)
def of_batch_norm(name, steps):
    """Initial parameters, and imperative losses on one context.

    He's weights, and norms that are no identities.
    """
    net, loss = make(name, nets.IMAGES, cpus(1))
    with autograd.record():
        net(*(mx.nd.array(a, dtype="float64") for a in nets.batch(name)[:-1]))
    rng, values = np.random.default_rng(0), []
    for parameter in parameters_of(net):
        shape, kind = parameter.shape, parameter.name
        if len(shape) > 1:
            array = rng.normal(0, np.sqrt(2 / np.prod(shape[1:])), shape)
        else:
            array = rng.normal(kind.endswith("gamma"), 0.1, shape)
        values.append(np.ones(shape) if kind.endswith("var") else array)
    set_values(net, values)
    with Devices(cpus(1)) as one:
        return values, train(net, name, steps, on_devices(net, loss, one))


def check(net, result, right):
    """Steps amplify the rounding of float64 by less than a wrong statistic changes."""
    np.testing.assert_allclose(result, right, rtol=1e-7)
    assert (abs(np.diff(right)) > 1e-4 * abs(right[0])).all()
    check_replicas(net)


CASES = [
    ("yolo3", "hybridize", Devices),
    ("yolo3", "static_shape", Loop),
    ("ssd", "static_shape", Devices),
    ("center_net", "hybridize", Loop),
    ("simple_pose", "hybridize", Devices),
    ("faster_rcnn", "hybridize", Devices),
    ("mask_rcnn", "hybridize", Loop),
]


@pytest.mark.parametrize("name, mode, kind", CASES)
def test_trains_hybridized_like_batch_norm(name, mode, kind):
    steps = (nets.IMAGES,) * 2
    values, right = of_batch_norm(name, steps)
    net, loss = make(name, nets.IMAGES // 2, cpus(2))
    set_values(net, values)
    set_mode(convert_sync_batchnorm(net, 2), mode)
    if kind is Loop:
        allow_plain_loop(net)
    with kind(cpus(2)) as devices:
        result = train(net, name, steps, on_devices(net, loss, devices))
    check(net, result, right)


@pytest.mark.parametrize("name", ["yolo3", "ssd"])
def test_parallel_net_trains_on_fewer_images(name):
    """One context gets no image where there is one; three are shared unevenly."""
    steps = 1, 3, 3
    values, right = of_batch_norm(name, steps)
    net, loss = make(name, None, cpus(2))
    set_values(net, values)
    # YOLO3 returns losses; the anchors that SSD returns have no rows to be joined.
    net = make_parallel(net, cpus(2), gather=name == "yolo3")
    net.hybridize()
    criterion = ParallelCriterion(lambda *parts: loss(*parts[:-1]) * parts[-1], net)

    def step(batch):
        *inputs, weights = (mx.nd.array(array, dtype="float64") for array in batch)
        with autograd.record():
            outputs = net(*inputs)
            if name == "yolo3":
                total = (loss(*outputs) * weights).sum()
            else:
                total = criterion(outputs, weights).sum()
        total.backward()
        return [total]

    check(net, train(net, name, steps, step), right)
