"""Nets for tests of make_parallel, and functions that train and compare nets."""

from functools import partial

from gluon_syncbn import check_replicas, make_parallel
from gluon_syncbn.nested import flatten

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import Trainer, nn

from support.blocks import Function
from support.helpers import assert_all_near, differentiate, set_mode, summed_grad
from support.nd import nd

# ---- Float64 nets with two inputs and two units.

array = partial(nd.array, dtype="float64")
X = [[1.0, 2], [3, 5], [-1, 2], [0, 1], [4, -2], [2, 2]]


def dense(units=2, inputs=2):
    return nn.Dense(units, in_units=inputs)


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


# ---- Nets of lives (lives.py).


class StatisticsInForward(nn.BatchNorm):
    """MXNet's BatchNorm, but with statistics that forward updates, as ours does."""

    collected = None  # a list of inputs while statistics are recomputed

    def forward(self, x):
        statistics = [p.data() for p in (self.running_mean, self.running_var)]
        uses_batch = autograd.is_training() or self.collected is not None
        uses_batch = uses_batch and not self._kwargs["use_global_stats"]
        inputs = x, self.gamma.data(), self.beta.data(), *(s.copy() for s in statistics)
        with autograd.train_mode() if uses_batch else autograd.predict_mode():
            y = mx.nd.BatchNorm(*inputs, **self._kwargs)
        if self.collected is not None and uses_batch:
            self.collected.append(x)
        elif uses_batch:
            momentum = self._kwargs["momentum"]
            self.write([momentum * s for s in statistics], 1 - momentum, x.detach())
        return y

    def write(self, former, weight, x):
        with autograd.pause():
            mean = x.mean(axis=0)
            var = ((x - mean) ** 2).mean(axis=0)
            self.running_mean.set_data(former[0] + weight * mean)
            self.running_var.set_data(former[1] + weight * var)


class Body(gluon.Block):
    """A net that reads an array and a constant, and can fail on one context."""

    def __init__(self, norm):
        super().__init__()
        self.failing, self.layers = None, nn.HybridSequential()
        self.layers.add(dense(), norm, dense(), nn.Activation("tanh"))
        self.scale = array([1.0, -1.5])
        self.shift = self.params.get_constant("shift", np.full((1, 2), 0.5))

    def forward(self, x, factor=1, is_doubled=False):
        if x.context == self.failing:
            raise ArithmeticError
        scale, shift = self.scale.as_in_context(x.context), self.shift.data(x.context)
        h = (self.layers(x) * scale - shift) * factor
        return (h, [h]) if is_doubled else h


class Branches(gluon.Block):
    """A Dense that records nothing for a shard whose labels are all 0."""

    def __init__(self):
        super().__init__()
        self.dense = dense()

    def forward(self, x, label=None):
        h = self.dense(x)
        if label is None:
            return h
        return (h if label.asnumpy().any() else h.detach()) * label


class Ramp(mx.init.Initializer):
    def _init_weight(self, name, data):
        data[:] = np.linspace(-1, 1.25, data.size).reshape(data.shape)


# Calls of a net in the scope of record. Each returns a list of outputs.


def _target(net, other, x, scope):
    with scope():
        target = net(x)
    return [net(x) - target.detach()]


def _fed_back(net, other, x):
    y = net(x)
    return [y, net(other(y))]


def _branches(net, other, x):
    label = array([[0.0]] * (len(x) - 1) + [[1.0]])
    return [net(x), other(x, label)]


CALLS = {
    "nothing": lambda net, other, x: [],
    "once": lambda net, other, x: [net(x)],
    "twice": lambda net, other, x: [net(x), net(x[:1] * 2)],
    "chain": lambda net, other, x: [net(other(x))],
    "chain and one": lambda net, other, x: [net(other(x)), net(x)],
    "own output": lambda net, other, x: [net(net(x))],
    "followed": lambda net, other, x: [other(net(x)), other(x)],
    "fed back": _fed_back,
    "gradient of the last input": lambda net, other, x: [net(x.detach(), x)],
    # MXNet itself uses only one gradient of a head that is given twice.
    "doubled": lambda net, other, x: [y * 1 for y in flatten(net(x, 0.5, True))],
    "branches": _branches,
    "own target": lambda *given: _target(*given, autograd.predict_mode),
    "paused target": lambda *given: _target(*given, autograd.pause),
}


# ---- Functions of nets.


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
