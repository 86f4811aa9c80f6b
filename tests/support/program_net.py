"""The net of a random program, and the data of its steps.

It must not know what the net should compute.
"""

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

import mxnet as mx
import numpy as np
from mxnet.gluon import nn

from support.blocks import Function
from support.helpers import cpus, set_mode

AWKWARD = -0.5, 0, 1e-6, -1e-12, 3  # gammas, of which some cannot be divided by


class Chains(Function):
    """Layers in chains that all begin at the input; each call of one gives an output.

    Before and after a layer is the identity: as a convolution, which computes it
    exactly and brings oneDNN's layouts in, or as no operator.
    """

    def __init__(self, program, layers):
        super().__init__()
        self._chains = program.chains
        channels = program.shape[1]
        eye = mx.init.Constant(np.eye(channels).reshape(channels, channels, 1, 1))
        arguments = {"use_bias": False, "in_channels": channels}
        self.layers, self.same = nn.HybridSequential(), nn.HybridSequential()
        self.layers.add(*layers)
        if program.convolutions:
            conv = nn.Conv2D(channels, 1, weight_initializer=eye, **arguments)
            conv.weight.grad_req = "null"
            self.same.add(conv)

    def compute(self, F, x):
        outputs = []
        for chain in self._chains:
            y = x
            for number in chain:
                y = self.layers[number](self.same(y))
                outputs.append(self.same(y))
        return outputs


def make_net(program):
    """The net on its contexts, what is called on each of these, and its layers."""
    contexts = cpus(program.contexts)
    rng = np.random.default_rng(program.seed)
    norms = [_norm(program, layer, rng) for layer in program.layers]
    net = norms[0] if program.bare else Chains(program, norms)
    net.cast(program.dtype)
    if program.way == "parallel":
        # Conversion would take the layers' settings away.
        gluon_syncbn.make_parallel(
            net, contexts, sync_bn=False, batch_axis=program.batch_axis
        )
    elif program.way == "plain_loop":
        gluon_syncbn.allow_plain_loop(net)
    net.initialize(ctx=contexts)
    return set_mode(net, program.mode), norms


def _norm(program, layer, rng):
    channels = program.shape[program.axis]
    arguments = {**vars(layer), "in_channels": channels}
    for name in "gamma_request", "beta_request", "gammas":
        del arguments[name]
    if layer.gammas != "ones":
        values = {
            "gamma": rng.normal(0, 1, channels),
            "beta": rng.normal(0, 1, channels),
            "running_mean": rng.normal(1, 1, channels),
            "running_variance": rng.uniform(0.5, 3, channels),
        }
        if layer.gammas == "awkward":
            values["gamma"] = rng.choice(AWKWARD, channels)
        for name, value in values.items():
            arguments[f"{name}_initializer"] = mx.init.Constant(value)
    norm = SyncBatchNorm(axis=program.axis, **arguments)
    for name in "gamma", "beta":
        getattr(norm, name).grad_req = layer.requests().get(name, "null")
    return norm


class Data:
    """The inputs of the net in one step, and the gradients of its outputs.

    `active` are the contexts that get rows, `x` has the shard of each context, None for
    one that is skipped, and `dys` the same for the gradients of each output.
    """

    def __init__(self, program, number, step):
        self.rows = [rows or 0 for rows in step.rows]
        self.active = [k for k, rows in enumerate(step.rows) if rows is not None]
        self._axis = program.batch_axis
        rng = np.random.default_rng([program.seed, number])
        shape = list(program.shape)
        shape[self._axis] = sum(self.rows)
        self.x = self.split(_random(program, shape, rng).astype(program.dtype))
        self.dys = [
            self.split(rng.normal(size=shape).astype(program.dtype))
            for _ in sum(program.chains, [])
        ]

    def split(self, whole):
        shards = np.split(whole, np.cumsum(self.rows)[:-1], self._axis)
        return [shard if k in self.active else None for k, shard in enumerate(shards)]

    def join(self, shards):
        """Those of the active contexts."""
        return np.concatenate([shards[k] for k in self.active], self._axis)


def _random(program, shape, rng):
    x = rng.normal(0.5, 2, shape)
    if program.data == "far":
        x += 1e4
    elif program.data == "small":
        x *= 1e-3
    elif program.data == "drifting":  # shards differ in mean and deviation
        column = [-1 if k == program.batch_axis else 1 for k in range(len(shape))]
        rows = np.arange(shape[program.batch_axis]).reshape(column)
        x = x * (1 + rows) + 3 * rows
    elif program.data == "constant":
        one = [1] * len(shape)
        one[program.axis] = shape[program.axis]
        x = np.broadcast_to(rng.normal(size=one), shape)
    return x
