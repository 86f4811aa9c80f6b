"""Parallel nets for tests, beside the same nets on one device.

Numbers are compared as helpers.py does.
"""

import gc
import weakref
from functools import partial

from gluon_syncbn import make_parallel

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block, Trainer, loss, nn

from support.helpers import assert_all_near, copy_parameters, set_mode, summed_grad
from support.nd import nd

SHAPE = 3, 6, 6


def small_net():
    net = nn.HybridSequential()
    norm = partial(nn.BatchNorm, momentum=0.875)  # exact in float32
    net.add(nn.Conv2D(4, 3, padding=1), norm(), nn.Activation("relu"))
    net.add(nn.Conv2D(5, 3, strides=2), norm(), nn.Dense(3))
    return net


def pair(contexts, mode="imperative"):
    """Make a float64 net twice: plain on one context, and parallel on `contexts`."""
    plain, parallel = small_net(), small_net()
    plain.cast("float64")
    parallel.cast("float64")
    mx.random.seed(3)
    plain.initialize(mx.init.Xavier())
    plain(nd.ones((2, *SHAPE), dtype="float64"))
    make_parallel(parallel, contexts).initialize()
    copy_parameters(plain, parallel)
    return set_mode(plain, mode), set_mode(parallel, mode)


def parameters(net):
    return list(net.collect_params().values())


def gradients(net):
    """Return the gradients of all parameters that have one, summed over the devices."""
    return [summed_grad(p) for p in parameters(net) if p.grad_req != "null"]


def batches(rows, dtype="float64"):
    rng = np.random.default_rng(0)
    for n in rows:
        x = nd.array(rng.normal(1, 2, (n, *SHAPE)), dtype=dtype)
        yield x, nd.array(rng.integers(0, 3, n), dtype=dtype)


def train(net, rows):
    """Train on batches of so many rows, as on one device; return the losses."""
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    criterion, losses = loss.SoftmaxCrossEntropyLoss(), []
    for x, label in batches(rows, parameters(net)[0].dtype):
        with autograd.record():
            batch_loss = criterion(net(x), label)
        batch_loss.backward()
        trainer.step(len(x))
        losses.append(batch_loss.asnumpy())
    mx.nd.waitall()
    return losses


def assert_same(results, expected):
    # 6 x 6 pixels of 9 images, and the sums of the steps before.
    assert_all_near(results, expected, count=2000)


def dense(contexts, weight=1.0):
    """One weight, in a parallel net if there are contexts."""
    net = nn.Dense(1, use_bias=False, in_units=1)
    if contexts:
        net = make_parallel(net, contexts)
    net.initialize(mx.init.Constant(weight))
    return net


def column(*values):
    return nd.array(values).reshape((-1, 1))


def weight_gradient(net):
    (weight,) = net.collect_params().values()
    return summed_grad(weight).item()


class Identity(autograd.Function):
    def forward(self, x):
        return x.copy()

    def backward(self, dy):
        return dy


class Traced(Block):
    """The identity, which counts the graphs of its calls that are still alive."""

    def __init__(self):
        super().__init__()
        self._functions = []

    def forward(self, x):
        function = Identity()
        self._functions.append(weakref.ref(function))
        return function(x)

    def count_graphs(self):
        mx.nd.waitall()
        for _ in range(3):  # a graph's contents are freed after it
            gc.collect()
        return sum(function() is not None for function in self._functions)
