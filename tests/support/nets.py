"""Nets for tests of make_parallel, and functions that train and compare nets."""

from functools import partial

from gluon_syncbn import check_replicas, make_parallel

import mxnet as mx
import numpy as np
from mxnet.gluon import Trainer, nn

from support.blocks import Function
from support.helpers import assert_all_near, differentiate, set_mode, summed_grad
from support.nd import nd

# ---- Float64 nets with two inputs and two units.

array = partial(nd.array, dtype="float64")
X = [[1.0, 2], [3, 5], [-1, 2], [0, 1], [4, -2], [2, 2]]


def dense(units=2, inputs=2, **options):
    return nn.Dense(units, in_units=inputs, **options)


class Net(Function):
    """Layers, and a function of their output and of the other inputs."""

    def __init__(self, *layers, function=None):
        super().__init__()
        self.layers = nn.HybridSequential()
        self.layers.add(*layers)
        self.function = function

    def compute(self, F, x, *others):
        h = self.layers(x)
        return self.function(F, h, *others) if self.function else h


class Normalized(Net):
    def __init__(self, **options):
        norm = nn.BatchNorm(in_channels=2, momentum=0.875)
        super().__init__(dense(), norm, dense(), **options)


def started(net, contexts, mode="imperative", seed=1):
    """Initialize a net, parallel if `contexts` are given, with random parameters."""
    net.cast("float64")
    if contexts:
        make_parallel(net, contexts)
    net.initialize(ctx=contexts or mx.cpu())
    rng = np.random.default_rng(seed)
    for parameter in net.collect_params().values():
        if parameter.shape and np.prod(parameter.shape) > 0:
            parameter.set_data(array(rng.uniform(0.5, 1.5, parameter.shape)))
    return set_mode(net, mode)


def train(net, rows=(6, 5, 1)):
    """Train on a batch of each size in `rows`; return the losses and a prediction."""
    settings = {"learning_rate": 0.001, "momentum": 0.9}
    trainer, found = Trainer(net.collect_params(), "sgd", settings), []
    for count in rows:
        loss = differentiate(lambda x: (net(x) ** 2).sum(), array(X[:count]))
        found.append(loss.asnumpy())
        trainer.step(count)
        mx.nd.waitall()  # MXNet's own static_shape nets read statistics too early
    return [*found, net(array(X)).asnumpy()]


def parameters_of(net):
    found = net.collect_params().values()
    return [parameter for parameter in found if parameter.grad_req != "null"]


def state_of(*nets):
    """Return parameters, which have to be equal on all devices, and gradients."""
    found = []
    for net in nets:
        check_replicas(net)
        for parameter in net.collect_params().values():
            found.append(parameter.list_data()[0].asnumpy())
            if parameter.grad_req != "null":
                found.append(parameter.grad().asnumpy())
    return found


def assert_same(results, expected):
    """Compare float64 results of a few training steps on batches of a few rows."""
    assert_all_near(results, expected, count=2000)


# ---- One weight in float32.


def one_weight(contexts, weight=1.0):
    net = make_parallel(nn.Dense(1, use_bias=False, in_units=1), contexts)
    net.initialize(mx.init.Constant(weight))
    return net


def column(*values):
    return nd.array(values).reshape((-1, 1))


def weight_gradient(net):
    (weight,) = net.collect_params().values()
    return summed_grad(weight).item()
