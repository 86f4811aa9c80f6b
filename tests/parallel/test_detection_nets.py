"""GluonCV's detection and pose nets train hybridized like nn.BatchNorm on one device.

Their graphs have several inputs, parts that are SymbolBlocks, shapes that depend on the
number of images, and operators whose output jumps where proposals change places, which
rounding in float64 does not cause.
"""

import functools

from gluon_syncbn import (
    allow_plain_loop,
    check_replicas,
    convert_sync_batchnorm,
    make_parallel,
)

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import Block, Constant, Trainer
from mxnet.gluon.utils import split_and_load
from support.helpers import cpus, set_mode

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


class Weighted(Block):
    """A net with its loss: the losses of images, times weights."""

    def __init__(self, net, loss):
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, *inputs_and_weights):
        *inputs, weights = inputs_and_weights
        outputs = self.net(*inputs)
        is_one = isinstance(outputs, mx.nd.NDArray)
        return self.loss(*([outputs] if is_one else outputs)) * weights


def train(net, loss, name, steps, contexts, is_parallel=False):
    """Losses of steps of SGD on so many images.

    The net and its loss are called once if they are parallel, else in a loop.
    """
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 2e-3})
    weighted, found = Weighted(net, loss), []
    if is_parallel:
        make_parallel(weighted, contexts)
        contexts = contexts[:1]
    for rows in steps:
        batch = [mx.nd.array(a[:rows], dtype="float64") for a in nets.batch(name)]
        with autograd.record():
            shards = zip(*(split_and_load(array, contexts) for array in batch))
            losses = [weighted(*shard) for shard in shards]
        autograd.backward(losses)
        trainer.step(rows)
        found.append(sum(float(each.sum().asscalar()) for each in losses))
    return np.array(found)


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
    return values, train(net, loss, name, steps, cpus(1))


ALL, FEW = (nets.IMAGES,) * 2, (1, 3, 3)
CASES = [
    ("yolo3", "static_shape", "plain loop", ALL),
    ("yolo3", "hybridize", "parallel", ALL),  # it amplifies rounding for one image
    ("ssd", "static_shape", "plain loop", ALL),
    ("ssd", "hybridize", "parallel", FEW),
    ("center_net", "hybridize", "plain loop", ALL),
    ("simple_pose", "hybridize", "parallel", ALL),
    ("faster_rcnn", "hybridize", "parallel", ALL),
    ("mask_rcnn", "hybridize", "plain loop", ALL),
]


@pytest.mark.parametrize("name, mode, way, steps", CASES)
def test_trains_hybridized_like_batch_norm(name, mode, way, steps):
    """One context gets no image where there is one; three are shared unevenly."""
    values, right = of_batch_norm(name, steps)
    net, loss = make(name, nets.IMAGES // 2, cpus(2))
    set_values(net, values)
    if way == "plain loop":
        allow_plain_loop(convert_sync_batchnorm(net, 2))
    result = train(set_mode(net, mode), loss, name, steps, cpus(2), way == "parallel")
    # Steps amplify the rounding of float64 by less than a wrong statistic changes.
    np.testing.assert_allclose(result, right, rtol=1e-7)
    assert (abs(np.diff(right)) > 1e-4 * abs(right[0])).all()
    check_replicas(net)
