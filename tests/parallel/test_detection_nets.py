"""GluonCV's detection and pose nets train hybridized like nn.BatchNorm on one device.

Their graphs have several inputs, parts that are SymbolBlocks, shapes that depend on the
number of images, and operators whose output jumps where proposals change places, which
rounding in float64 does not cause.
"""

import functools
from contextlib import contextmanager

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import Constant, Trainer
from support import reference
from support.helpers import cpus, put, set_mode, split_rows

from gluon_syncbn import (
    Devices,
    ParallelCriterion,
    check_replicas,
    convert_sync_batchnorm,
    make_parallel,
)

nets = pytest.importorskip("support.detection_nets", reason="GluonCV is not installed")

NAMES = ["yolo3", "ssd", "center_net", "simple_pose", "faster_rcnn", "mask_rcnn"]
CASES = [(name, "hybridize") for name in NAMES]
CASES += [(name, "static_shape") for name in ("yolo3", "ssd")]


@contextmanager
def gluoncv_in(dtype):
    """GluonCV takes `dtype` for float32, and samples the same regions everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        for module in mx.nd, mx.sym:
            arange = functools.partial(module.arange, dtype=dtype)

            def uniform(low, high, shape, arange=arange):
                return arange(shape[0]) / shape[0]

            def cast(data, dtype, cast=module.cast, float32=dtype):
                return cast(data, dtype=float32 if dtype == "float32" else dtype)

            patch.setattr(module, "arange", arange)
            patch.setattr(module.random, "uniform", uniform)
            patch.setattr(module, "cast", cast)
            if dtype == "float64":  # which MXNet's operator does not know
                patch.setattr(module, "amp_multicast", lambda *arrays, **_: arrays)
        yield


def make(name, rows, contexts, dtype):
    net, loss = getattr(nets, name)(rows)
    net.initialize(ctx=contexts, force_reinit=True)  # a part of it is
    net.cast(dtype)
    return net, loss


def parameters_of(net):
    parameters = net.collect_params().values()
    return [p for p in parameters if not isinstance(p, Constant)]


def set_values(net, values):
    parameters = parameters_of(net)
    assert len(parameters) == len(values)
    for parameter, array in zip(parameters, values):
        parameter.set_data(mx.nd.array(array, dtype=parameter.dtype))


@functools.lru_cache(maxsize=None)
def initial_values(name):
    """He's weights, and norms that are no identities."""
    net, loss = make(name, nets.IMAGES, cpus(1), "float32")
    with gluoncv_in("float32"), autograd.record():
        net(*map(mx.nd.array, nets.batch(name)[:-1]))
    rng, values = np.random.default_rng(0), []
    for parameter in parameters_of(net):
        shape, kind = parameter.shape, parameter.name
        if len(shape) > 1:
            array = rng.normal(0, np.sqrt(2 / np.prod(shape[1:])), shape)
        else:
            array = rng.normal(kind.endswith("gamma"), 0.1, shape)
        values.append(np.ones(shape) if kind.endswith("var") else array)
    return values


def losses(net, name, steps, step):
    """Losses of steps of SGD on so many images; `step` gives those of the shards."""
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 2e-3})
    found = []
    for rows in steps:
        totals = step([array[:rows] for array in nets.batch(name)])
        trainer.step(rows)
        found.append(sum(float(total.asscalar()) for total in totals))
    return np.array(found)


def on_devices(net, loss, devices, dtype):
    """The step of a loop over devices, which returns their losses."""

    def total(*shard):
        *inputs, weights = shard
        outputs = net(*inputs)
        parts = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        return (loss(*parts) * weights).sum()

    def step(batch):
        rows = [len(batch[0]) // len(devices)] * len(devices)
        parts = (split_rows(array, rows) for array in batch)
        shards = [put(part, devices.contexts, dtype) for part in parts]
        with autograd.record():
            totals = devices.map(total, *shards)
        devices.map(lambda total: total.backward(), totals)
        return totals

    return step


@functools.lru_cache(maxsize=None)
def of_batch_norm(name, steps, dtype, seed=None):
    """Imperative losses on one context; a seed changes the last bits of the images."""
    net, loss = make(name, nets.IMAGES, cpus(1), dtype)
    set_values(net, initial_values(name))
    with Devices(cpus(1)) as one, gluoncv_in(dtype):
        step = on_devices(net, loss, one, dtype)

        def noisy(batch):
            images, *others = batch
            if seed is not None:
                signs = np.random.default_rng(seed).choice([-1, 1], images.shape)
                images = images * (1 + signs * np.finfo(dtype).eps)
            return step([images, *others])

        return losses(net, name, steps, noisy)


def check(result, name, steps, dtype):
    """Compares with nn.BatchNorm's losses, as far as rounding lets these be right.

    The bound is ten times what is seen where the last bits of the images change.
    """
    right = of_batch_norm(name, steps, "float64")
    errors = [of_batch_norm(name, steps, dtype, seed) - right for seed in range(3)]
    count = nets.IMAGES * nets.SIZE**2
    rtol, atol = reference.tolerance(dtype, count, scale=abs(right).max())
    bounds = 10 * np.max(np.abs(errors), axis=0) + atol + rtol * abs(right)
    assert (abs(result - right) <= bounds).all(), (result, right, bounds)
    assert (abs(np.diff(right)) > 3 * bounds.max()).all()


@pytest.mark.timeout(280)
@pytest.mark.parametrize("name, mode", CASES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("count", [1, 2])
def test_trains_hybridized_like_batch_norm(name, mode, dtype, count, make_devices):
    devices, steps = make_devices(count), (nets.IMAGES,) * 2
    net, loss = make(name, nets.IMAGES // count, devices.contexts, dtype)
    set_values(net, initial_values(name))
    set_mode(convert_sync_batchnorm(net, count), mode)
    with gluoncv_in(dtype):
        result = losses(net, name, steps, on_devices(net, loss, devices, dtype))
    check(result, name, steps, dtype)
    check_replicas(net)


@pytest.mark.parametrize("name", ["yolo3", "ssd"])
def test_parallel_net_trains_on_fewer_images(name):
    """A context sits out where there is one image, and three are shared unevenly."""
    net, loss = make(name, None, cpus(2), "float64")
    set_values(net, initial_values(name))
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

    steps = 1, 3, 3
    with gluoncv_in("float64"):
        result = losses(net, name, steps, step)
    check(result, name, steps, "float64")
    check_replicas(net)
