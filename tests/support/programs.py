"""Random training programs of layers: a strategy of hypothesis, their nets and data."""

from types import SimpleNamespace

from gluon_syncbn import SyncBatchNorm

import mxnet as mx
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from mxnet.gluon import nn

from support.blocks import Function
from support.helpers import cpus, set_mode

SETTINGS = settings(
    database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


def one_of(*values):
    return st.sampled_from(values)


def once_in(count):
    return one_of(*[False] * (count - 1), True)


@st.composite
def programs(draw):
    dtype = draw(one_of("float32", "float32", "float64", "float16"))
    ndim = draw(st.integers(2, 5))
    # Convolutions around layers bring in oneDNN's layouts.
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
    shape[batch_axis] = 0  # make_data sets the number of rows
    # A forward of the net calls the layers with these indices, each with the batch.
    uses = draw(one_of([0], [0], [0], [0, 1], [0, 0], [0, 1, 0]))
    x_grad_req = draw(one_of("write", "write", "add", "null"))
    if convolutions and mx.__version__ < "1.7" and x_grad_req == "add":
        x_grad_req = "write"  # MXNet 1.6's 1 x 1 convolution does not add
    layer = layers(needs_gradient=x_grad_req == "null", dtype=dtype)
    program = SimpleNamespace(
        seed=draw(st.integers(0, 2**32 - 1)),  # decides all values
        contexts=draw(one_of(2, 1, 2, 2, 3, 3, 4)),
        mode=draw(one_of("imperative", "hybridize", "static_alloc", "static_shape")),
        uses=uses,
        convolutions=convolutions,
        dtype=dtype,
        shape=shape,
        batch_axis=batch_axis,
        axis=axis - ndim if draw(once_in(3)) else axis,
        data=draw(one_of("normal", "drifting", "far", "constant", "small")),
        x_grad_req=x_grad_req,
        numpy=draw(once_in(5)),  # arrays of mx.np
        layers=[draw(layer) for _ in range(1 + max(uses))],
    )
    program.steps = draw(st.lists(steps(program), min_size=1, max_size=6))
    return program


@st.composite
def layers(draw, needs_gradient, dtype):
    activation = draw(one_of(None, "identity", "relu", "leaky_relu"))
    grad_reqs = ["write"] if needs_gradient else ["write", "write", "add", "null"]
    # If the running variance is 0, a smaller epsilon makes float16 outputs overflow.
    epsilons = (1e-3, 0.5) if dtype == "float16" else (1e-5, 1e-3, 0.5)
    options = SimpleNamespace(
        momentum=draw(one_of(0.9, 0.5, 0.0, 1.0)),
        epsilon=draw(one_of(*epsilons)),
        scale=needs_gradient or not draw(once_in(5)),
        center=not draw(once_in(5)),
        unbiased_running_var=draw(once_in(3)),
        activation=activation,
        slope=draw(one_of(0.0625, 0.25)) if activation == "leaky_relu" else None,
    )
    return SimpleNamespace(
        options=options,
        gamma_grad_req=draw(one_of(*grad_reqs)),
        beta_grad_req=draw(one_of(*grad_reqs)),
        initial_values=draw(one_of("default", "normal", "normal", "awkward")),
    )


@st.composite
def steps(draw, program):
    others = "train_unrecorded", "predict", "predict_recorded"
    kind, count = draw(one_of(*["train"] * 6, *others)), program.contexts
    rows = [draw(st.integers(1, 4)) for _ in range(count)]  # a number for each context
    # oneDNN refuses an empty float32 shard in convolutions and in hybridized nets.
    has_neither = program.mode == "imperative" and not program.convolutions
    if count > 1 and (has_neither or program.dtype != "float32") and draw(once_in(5)):
        rows[draw(st.integers(0, count - 1))] = 0
    backwards = 1 + (kind == "train" and draw(once_in(7)))  # calls on the same graph
    return SimpleNamespace(kind=kind, rows=rows, backwards=backwards)


# ---- Nets and data.


class ProgramNet(Function):
    """A net that calls the layers `program.uses`, perhaps between convolutions."""

    def __init__(self, program, layers):
        super().__init__()
        self._uses = program.uses
        channels = program.shape[1]  # used for convolutions only, where axis is 1
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
    rng = np.random.default_rng(program.seed)
    norms = [_norm(program, layer, rng) for layer in program.layers]
    net = ProgramNet(program, norms)
    net.cast(program.dtype)
    net.initialize(ctx=cpus(program.contexts))
    return set_mode(net, program.mode), norms


def _norm(program, layer, rng):
    channels, values = program.shape[program.axis], {}
    if layer.initial_values != "default":
        values = {
            "gamma": rng.normal(0, 1, channels),
            "beta": rng.normal(0, 1, channels),
            "running_mean": rng.normal(1, 1, channels),
            "running_variance": rng.uniform(0.5, 3, channels),
        }
        if layer.initial_values == "awkward":  # some gammas are near 0
            values["gamma"] = rng.choice([-0.5, 0, 1e-6, -1e-12, 3], channels)
    values = {f"{n}_initializer": mx.init.Constant(v) for n, v in values.items()}
    arguments = {"axis": program.axis, "in_channels": channels, **vars(layer.options)}
    norm = SyncBatchNorm(**arguments, **values)
    if layer.options.scale:
        norm.gamma.grad_req = layer.gamma_grad_req
    if layer.options.center:
        norm.beta.grad_req = layer.beta_grad_req
    return norm


def make_data(program, number, step):
    """Return the batch of a step, and the gradient of each output."""
    rng = np.random.default_rng([program.seed, number])
    shape = list(program.shape)
    shape[program.batch_axis] = sum(step.rows)
    dys = [rng.normal(size=shape) for _ in program.uses]
    return [a.astype(program.dtype) for a in (_random(program, shape, rng), *dys)]


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
