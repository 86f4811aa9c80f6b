"""Random training programs, each made from a seed, and a command that runs many.

    python tests/random_programs.py --seeds 0:10000
    python tests/random_programs.py --program 'Program(seed=17, ...)'

A program is data: a small net, where and how it runs, and its steps. program_runner.py
runs it against the oracle. The command prints the program that fails, which the second
form runs again, also after it was made smaller by hand; one that hangs ends with the
stacks of all threads. Steps that fail are the subject of support/failed_steps.py.
"""

import argparse
import faulthandler
import random
import sys
import traceback
from dataclasses import dataclass
from typing import List, Optional

from support.program_runner import run

import gluon_syncbn

LIMIT = 120  # seconds for a program, which takes some 0.05 s


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
    element for each context: None where it is skipped, 0 for an empty shard.
    """

    kind: str
    rows: List[Optional[int]]
    backwards: int = 1  # through the one graph


@dataclass
class Program:
    seed: int
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


def generate(seed):
    """The program of this seed, the same on every machine."""
    draw = random.Random(seed)
    one_of = draw.choice
    contexts = one_of([1, 2, 2, 2, 3, 3, 4])
    way = one_of(["devices", "devices", "parallel", "plain_loop"])
    ndim = draw.randint(2, 5)
    dtype = one_of(["float32", "float32", "float64", "float16"])
    convolutions = ndim == 4 and dtype == "float32" and draw.random() < 0.5
    axis = 1 if convolutions else draw.randrange(ndim)
    others = [k for k in range(ndim) if k != axis]
    batch_axis = one_of(others) if draw.random() < 0.2 else others[0]
    if convolutions:
        batch_axis = 0
    shape = [draw.randint(1, 5) for _ in range(ndim)]
    if draw.random() < 0.1:
        shape[one_of(others)] = 700  # enough for several threads
    shape[axis] = one_of([8, 16]) if convolutions else one_of([1, 2, 3, 5, 9, 70])
    shape[batch_axis] = 0
    chains = one_of([[[0]]] * 3 + [[[0], [1]], [[0], [0]]])
    data = one_of(["normal", "drifting", "far", "constant", "small"])
    if dtype != "float16" and draw.random() < 0.4:  # gradients would overflow
        chains = one_of([[[0, 1]], [[0, 0]], [[0, 1], [1]], [[0, 1], [1, 0]]])
    x_request = one_of(["write", "write", "add", "null"])
    layers = [
        _layer(draw, needs_gradient=x_request == "null")
        for _ in range(1 + max(map(max, chains)))
    ]
    if dtype == "float16":
        for layer in layers:  # or else outputs overflow, with statistics of one row
            layer.epsilon = max(layer.epsilon, 1e-3)
    program = Program(
        seed=seed,
        way=way,
        contexts=contexts,
        mode=one_of(["imperative", "hybridize", "static_alloc", "static_shape"]),
        chains=chains,
        bare=chains == [[0]] and not convolutions and draw.random() < 0.5,
        convolutions=convolutions,
        dtype=dtype,
        shape=shape,
        batch_axis=batch_axis,
        axis=axis - ndim if draw.random() < 0.3 else axis,
        data=data,
        x_request=x_request,
        numpy=draw.random() < 0.2,
        trainer=draw.random() < 0.3 and dtype != "float16",
        layers=layers,
        steps=[],
    )
    program.steps = [_step(draw, program) for _ in range(draw.randint(2, 6))]
    return program


def _layer(draw, needs_gradient):
    one_of = draw.choice
    activation = one_of([None, "identity", "relu", "leaky_relu"])
    slope = one_of([0.0625, 0.25])
    requests = ["write"] if needs_gradient else ["write", "write", "add", "null"]
    return Layer(
        momentum=one_of([0.9, 0.5, 0.0, 1.0]),
        epsilon=one_of([1e-5, 1e-3, 0.5]),
        scale=needs_gradient or draw.random() < 0.8,
        center=draw.random() < 0.8,
        unbiased_running_var=draw.random() < 0.3,
        activation=activation,
        slope=slope if activation == "leaky_relu" else None,
        gamma_request=one_of(requests),
        beta_request=one_of(requests),
        gammas=one_of(["ones", "normal", "normal", "awkward"]),
    )


def _step(draw, program):
    others = ["train_unrecorded", "predict", "predict_recorded"]
    kind, rows = draw.choice(["train"] * 6 + others), _rows(draw, program)
    if not any(rows):
        rows[rows.index(0)] = 1
    return Step(kind, rows, backwards=1 + (kind == "train" and draw.random() < 0.15))


def _rows(draw, program):
    count = program.contexts
    if program.way == "parallel":
        # As make_parallel splits them.
        total = draw.randint(1, 3 * count)
        active = min(total, count)
        share, more = divmod(total, active)
        shares = [share + (k < more) for k in range(active)]
        return shares + [None] * (count - active)
    rows = [draw.randint(1, 4) for _ in range(count)]
    # MXNet's own float32 operators, which are around a layer elsewhere, refuse them.
    alone = program.bare or program.dtype != "float32"
    empty = alone and program.way == "devices" and draw.random() < 0.2
    if not program.trainer and draw.random() < 0.25:  # a trainer wants all gradients
        for k in draw.sample(range(count), draw.randint(0, count - 1)):
            rows[k] = None
    if empty:
        rows[draw.randrange(count)] = 0
    return rows


def run_seeds(seeds):
    """Runs the seeds' programs; prints those that fail, and returns their seeds."""
    return [seed for seed in seeds if not succeeds(generate(seed))]


def succeeds(program):
    """True if the program agrees with the oracle; prints it if not."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    try:
        run(program)
        return True
    except Exception:
        gluon_syncbn.recover()  # for the next program
        print(f"\n{program!r}\n{traceback.format_exc()}", file=sys.stderr)
        return False
    finally:
        faulthandler.cancel_dump_traceback_later()


def main():
    from tqdm import tqdm  # which the tests do without

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0:100", help="first:end, without the end")
    parser.add_argument("--program", help="the text of one program, to run again")
    arguments = parser.parse_args()
    faulthandler.enable()
    if arguments.program:
        sys.exit(not succeeds(eval(arguments.program)))
    first, _, end = arguments.seeds.partition(":")
    failing = run_seeds(tqdm(range(int(first), int(end)), smoothing=0))
    print(f"{int(end) - int(first)} programs, {len(failing)} failing: {failing}")
    sys.exit(bool(failing))


if __name__ == "__main__":
    main()
