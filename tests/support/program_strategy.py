"""Random training programs, as a strategy of hypothesis.

A program is data: a small net, where and how it runs, and its steps. Each choice begins
with the simplest value, to which hypothesis reduces a program that fails.
"""

from dataclasses import dataclass
from typing import List, Optional

from hypothesis import strategies as st


@dataclass
class Layer:
    """Arguments of a SyncBatchNorm, and what is asked of its parameters."""

    momentum: float
    epsilon: float
    scale: bool
    center: bool
    unbiased_running_var: bool
    activation: Optional[str]
    slope: Optional[float]
    gamma_request: str
    beta_request: str
    gammas: str  # "ones" and zero statistics, as initialized; "normal"; "awkward"

    def requests(self):
        """The grad_req of each parameter that has a gradient."""
        asked = {
            "gamma": self.gamma_request if self.scale else "null",
            "beta": self.beta_request if self.center else "null",
        }
        return {name: request for name, request in asked.items() if request != "null"}


@dataclass
class Step:
    """One thing that the program does.

    kind is "train", "train_unrecorded", "predict" or "predict_recorded". rows has an
    element for each context: None without a shard, 0 for an empty shard.
    """

    kind: str
    rows: List[Optional[int]]
    backwards: int = 1  # through the one graph


@dataclass
class Program:
    seed: int  # of the values
    way: str  # "devices", "parallel" or "plain_loop"
    contexts: int
    mode: str
    chains: List[List[int]]  # numbers of layers; each call of one gives an output
    bare: bool  # the layer itself is the net
    convolutions: bool  # around layers, for oneDNN's layouts
    dtype: str
    shape: List[int]  # with 0 for the rows
    batch_axis: int
    axis: int
    data: str
    x_request: str
    numpy: bool  # arrays of mx.np
    trainer: bool  # whether Trainer.step follows each recorded training step
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
    way = draw(one_of("devices", "devices", "parallel", "plain_loop"))
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
    chains = draw(one_of([[0]], [[0]], [[0]], [[0], [1]], [[0], [0]]))
    if dtype != "float16" and draw(once_in(3)):  # its gradients would overflow
        chains = draw(one_of([[0, 1]], [[0, 0]], [[0, 1], [1]], [[0, 1], [1, 0]]))
    x_request = draw(one_of("write", "write", "add", "null"))
    layer = layers(needs_gradient=x_request == "null", dtype=dtype)
    program = Program(
        seed=draw(st.integers(0, 2**32 - 1)),
        way=way,
        contexts=contexts,
        mode=draw(one_of("imperative", "hybridize", "static_alloc", "static_shape")),
        chains=chains,
        bare=chains == [[0]] and not convolutions and draw(st.booleans()),
        convolutions=convolutions,
        dtype=dtype,
        shape=shape,
        batch_axis=batch_axis,
        axis=axis - ndim if draw(once_in(3)) else axis,
        data=draw(one_of("normal", "drifting", "far", "constant", "small")),
        x_request=x_request,
        numpy=draw(once_in(5)),
        trainer=dtype != "float16" and draw(once_in(3)),
        layers=[draw(layer) for _ in range(1 + max(map(max, chains)))],
        steps=[],
    )
    program.steps = draw(st.lists(steps(program), min_size=1, max_size=6))
    return program


@st.composite
def layers(draw, needs_gradient, dtype):
    activation = draw(one_of(None, "identity", "relu", "leaky_relu"))
    requests = ["write"] if needs_gradient else ["write", "write", "add", "null"]
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
        gamma_request=draw(one_of(*requests)),
        beta_request=draw(one_of(*requests)),
        gammas=draw(one_of("ones", "normal", "normal", "awkward")),
    )


@st.composite
def steps(draw, program):
    others = "train_unrecorded", "predict", "predict_recorded"
    kind, rows = draw(one_of(*["train"] * 6, *others)), draw(rows_of(program))
    if not any(rows):
        rows[rows.index(0)] = 1
    return Step(kind, rows, backwards=1 + (kind == "train" and draw(once_in(7))))


@st.composite
def rows_of(draw, program):
    count = program.contexts
    if program.way == "parallel":
        # As make_parallel splits them.
        total = draw(st.integers(1, 3 * count))
        active = min(total, count)
        share, more = divmod(total, active)
        shares = [share + (k < more) for k in range(active)]
        return shares + [None] * (count - active)
    rows = [draw(st.integers(1, 4)) for _ in range(count)]
    # MXNet's own float32 operators, which are around a layer elsewhere, refuse them.
    alone = program.bare or program.dtype != "float32"
    if alone and program.way == "devices" and draw(once_in(5)):
        rows[draw(st.integers(0, count - 1))] = 0
    return rows
