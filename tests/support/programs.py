"""Random training programs: a strategy of hypothesis, their nets, and their data.

A program is data: a small net, where and how it runs, and its steps. Each choice begins
with the simplest value, to which hypothesis reduces a program that fails.
"""

from dataclasses import dataclass
from typing import List, Optional

from gluon_syncbn import SyncBatchNorm

import mxnet as mx
import numpy as np
from hypothesis import strategies as st
from mxnet.gluon import nn

from support.blocks import Function
from support.helpers import cpus, set_mode

AWKWARD = -0.5, 0, 1e-6, -1e-12, 3  # gammas, of which some cannot be divided by


@dataclass
class Layer:
    """Arguments of a SyncBatchNorm, and its parameters."""

    momentum: float
    epsilon: float
    scale: bool
    center: bool
    unbiased_running_var: bool
    activation: Optional[str]
    slope: Optional[float]
    gamma_grad_req: str
    beta_grad_req: str
    gammas: str  # "ones" (all values as initialized), "normal" or "awkward"


@dataclass
class Step:
    """One thing that the program does, on a shard of `rows[k]` rows on context k."""

    kind: str  # "train", "train_unrecorded", "predict" or "predict_recorded"
    rows: List[int]
    backwards: int  # through the one graph


@dataclass
class Program:
    seed: int  # decides all values
    contexts: int
    mode: str
    uses: List[int]  # numbers of layers that are called with the batch
    convolutions: bool  # around layers, for oneDNN's layouts
    dtype: str
    shape: List[int]  # 0 stands for the rows
    batch_axis: int
    axis: int
    data: str
    x_grad_req: str
    numpy: bool  # arrays of mx.np
    layers: List[Layer]
    steps: List[Step]


def one_of(*values):
    return st.sampled_from(values)


def once_in(count):
    """True in one of `count` draws, else False."""
    return one_of(*[False] * (count - 1), True)


@st.composite
def programs(draw):
    contexts = draw(one_of(2, 1, 2, 2, 3, 3, 4))
    dtype = draw(one_of("float32", "float32", "float64", "float16"))
    ndim = draw(st.integers(2, 5))
    convolutions = ndim == 4 and dtype == "float32" and draw(st.booleans())
    axis = 1 if convolutions else draw(st.integers(0, ndim - 1))
    others = [k for k in range(ndim) if k != axis]
    batch_axis = others[0]
    if not convolutions and draw(once_in(5)):
        batch_axis = draw(one_of(*others))
    shape = [draw(st.integers(1, 5)) for _ in range(ndim)]
    if draw(once_in(10)):
        shape[draw(one_of(*others))] = 700  # enough for several threads
    shape[axis] = draw(one_of(8, 16) if convolutions else one_of(1, 2, 3, 5, 9, 70))
    shape[batch_axis] = 0
    uses = draw(one_of([0], [0], [0], [0, 1], [0, 0], [0, 1, 0]))
    x_grad_req = draw(one_of("write", "write", "add", "null"))
    layer = layers(needs_gradient=x_grad_req == "null", dtype=dtype)
    program = Program(
        seed=draw(st.integers(0, 2**32 - 1)),
        contexts=contexts,
        mode=draw(one_of("imperative", "hybridize", "static_alloc", "static_shape")),
        uses=uses,
        convolutions=convolutions,
        dtype=dtype,
        shape=shape,
        batch_axis=batch_axis,
        axis=axis - ndim if draw(once_in(3)) else axis,
        data=draw(one_of("normal", "drifting", "far", "constant", "small")),
        x_grad_req=x_grad_req,
        numpy=draw(once_in(5)),
        layers=[draw(layer) for _ in range(1 + max(uses))],
        steps=[],
    )
    program.steps = draw(st.lists(steps(program), min_size=1, max_size=6))
    return program


@st.composite
def layers(draw, needs_gradient, dtype):
    activation = draw(one_of(None, "identity", "relu", "leaky_relu"))
    grad_reqs = ["write"] if needs_gradient else ["write", "write", "add", "null"]
    # Outputs of float16 overflow with a smaller one and the statistics of one row.
    epsilons = (1e-3, 0.5) if dtype == "float16" else (1e-5, 1e-3, 0.5)
    return Layer(
        momentum=draw(one_of(0.9, 0.5, 0.0, 1.0)),
        epsilon=draw(one_of(*epsilons)),
        scale=needs_gradient or not draw(once_in(5)),
        center=not draw(once_in(5)),
        unbiased_running_var=draw(once_in(3)),
        activation=activation,
        slope=draw(one_of(0.0625, 0.25)) if activation == "leaky_relu" else None,
        gamma_grad_req=draw(one_of(*grad_reqs)),
        beta_grad_req=draw(one_of(*grad_reqs)),
        gammas=draw(one_of("ones", "normal", "normal", "awkward")),
    )


@st.composite
def steps(draw, program):
    others = "train_unrecorded", "predict", "predict_recorded"
    kind, count = draw(one_of(*["train"] * 6, *others)), program.contexts
    rows = [draw(st.integers(1, 4)) for _ in range(count)]
    # oneDNN's operators, beside a layer and in its graph, refuse an empty shard.
    is_plain = program.mode == "imperative" and not program.convolutions
    if count > 1 and (is_plain or program.dtype != "float32") and draw(once_in(5)):
        rows[draw(st.integers(0, count - 1))] = 0
    return Step(kind, rows, backwards=1 + (kind == "train" and draw(once_in(7))))


# ---- Nets and data.


class Uses(Function):
    """Layers that are called with the batch; each call gives an output.

    An identity precedes and follows each layer: an exact convolution, which brings in
    oneDNN's layouts, or nothing.
    """

    def __init__(self, program, layers):
        super().__init__()
        self._uses = program.uses
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
        return [self.same(self.layers[k](self.same(x))) for k in self._uses]


def make_net(program):
    """Return the net on its contexts, and its layers."""
    contexts = cpus(program.contexts)
    rng = np.random.default_rng(program.seed)
    norms = [_norm(program, layer, rng) for layer in program.layers]
    net = Uses(program, norms)
    net.cast(program.dtype)
    net.initialize(ctx=contexts)
    return set_mode(net, program.mode), norms


def _norm(program, layer, rng):
    channels = program.shape[program.axis]
    arguments = {**vars(layer), "in_channels": channels}
    for name in "gamma_grad_req", "beta_grad_req", "gammas":
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
    if layer.scale:
        norm.gamma.grad_req = layer.gamma_grad_req
    if layer.center:
        norm.beta.grad_req = layer.beta_grad_req
    return norm


class Data:
    """The inputs `x` and the gradients `dys` of each output in one step, by context."""

    def __init__(self, program, number, step):
        self.rows, self._axis = step.rows, program.batch_axis
        rng = np.random.default_rng([program.seed, number])
        shape = list(program.shape)
        shape[self._axis] = sum(self.rows)
        self.x = self._split(_random(program, shape, rng).astype(program.dtype))
        self.dys = [
            self._split(rng.normal(size=shape).astype(program.dtype))
            for _ in program.uses
        ]

    def _split(self, whole):
        return np.split(whole, np.cumsum(self.rows)[:-1], self._axis)

    def join(self, shards):
        return np.concatenate(shards, self._axis)


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
