"""Float64 nets for whole programs, by plain MXNet on one device or by make_parallel."""

from functools import partial

from gluon_syncbn import check_replicas, make_parallel

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn

from support.blocks import Function
from support.helpers import set_mode
from support.nd import nd

array = partial(nd.array, dtype="float64")
X = [[1.0, 2], [3, 5], [-1, 2], [0, 1], [4, -2], [2, 2]]


def dense(units=2, inputs=2, **options):
    return nn.Dense(units, in_units=inputs, **options)


class Net(Function):
    """Layers, and a function of what they compute."""

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
    """Start a net on its devices, with random parameters that are equal on all."""
    net.cast("float64")
    if contexts:
        make_parallel(net, contexts)
    net.initialize(ctx=contexts or mx.cpu())
    rng = np.random.default_rng(seed)
    for parameter in net.collect_params().values():
        if parameter.shape and np.prod(parameter.shape) > 0:
            parameter.set_data(array(rng.uniform(0.5, 1.5, parameter.shape)))
    return set_mode(net, mode)


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


def backward(head_of):
    with autograd.record():
        heads = head_of()
    heads.backward()
    return heads.asnumpy()


def parameters_of(net):
    found = net.collect_params().values()
    return [parameter for parameter in found if parameter.grad_req != "null"]


def clip_gradients(net):
    """As gluon.utils.clip_global_norm, which is for float32 alone."""
    gradients = [parameter.grad() for parameter in parameters_of(net)]
    norm = sum((gradient.asnumpy() ** 2).sum() for gradient in gradients) ** 0.5
    assert norm > 0.5
    for gradient in gradients:
        gradient *= 0.5 / norm


def results_of(program, contexts, mode="imperative"):
    def start(net, mode=mode, seed=1):
        return started(net, contexts, mode, seed)

    values, *nets = program(start)
    mx.nd.waitall()
    values = [*values, *(net.predicted for net in nets if hasattr(net, "predicted"))]
    return values + state_of(*nets)
