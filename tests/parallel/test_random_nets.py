"""Random programs of one device equal plain MXNet after make_parallel.

A program draws what its net, its loss and its steps hold; test_programs.py has each of
these kinds alone. GLUON_SYNCBN_PROGRAMS=10000 runs so many, and other ones each time.
"""

from dataclasses import dataclass, fields

import mxnet as mx
from hypothesis import strategies as st
from mxnet import autograd, gluon
from mxnet.gluon import Trainer, nn
from support.blocks import gluon_1_only
from support.helpers import MODES, cpus, set_mode
from support.parallel_nets import assert_same
from support.programs import random_test
from support.whole_programs import (
    X,
    array,
    clip_gradients,
    dense,
    parameters_of,
    started,
    state_of,
)

CHANGES = "nothing", "clip", "set_data", "in place", "own optimizer"


@dataclass
class Program:
    contexts: int
    mode: str  # the net's children have it
    rows: list  # one number for each step
    change: str  # the program does it after each backward
    has_constant: bool  # an attribute without a gradient
    is_doubled: bool  # the result holds an array twice
    branches: bool  # rows without a label have no graph
    decays: bool  # the loss holds all parameters
    is_called_twice: bool  # and the second input is a variable
    accumulates: bool  # grad_req="add"
    later: int  # the step before which a norm is added
    frozen: int  # the step before which the first layer is frozen


def programs():
    values = {
        "contexts": st.integers(1, 3),
        "mode": st.sampled_from(list(MODES)),
        "rows": st.lists(st.integers(2, 6), min_size=1, max_size=4),
        "change": st.sampled_from(CHANGES),
        "later": st.integers(0, 4),
        "frozen": st.integers(1, 4),
    }
    flags = {field.name: st.booleans() for field in fields(Program)}
    return st.builds(Program, **{**flags, **values})


def norm_of(program):
    """Return no norm if it is used twice: only ours updates its statistics twice."""
    if program.is_called_twice:
        return dense()
    return nn.BatchNorm(in_channels=2, momentum=0.875)


class Net(gluon.Block):
    def __init__(self, program):
        super().__init__()
        self.program, self.body = program, nn.HybridSequential()
        self.body.add(dense(), norm_of(program), dense())
        self.scale = array([1.0, -2.0])

    def forward(self, x, label):
        h = self.body(x)
        if self.program.has_constant:
            h = h * self.scale.as_in_context(x.context)
        if self.program.branches and not label.asnumpy().any():
            h = h.detach()
        h = h * label.reshape((-1, 1))
        return (h, [h]) if self.program.is_doubled else (h, [])


def results_of(program, contexts):
    net = started(Net(program), contexts)
    set_mode(net.body, program.mode)
    settings = {"learning_rate": 0.001, "momentum": 0.5}
    trainer = Trainer(net.collect_params(), "sgd", settings)
    if program.accumulates:
        # MXNet 1.6 does not add the gradients of its own BatchNorm.
        for parameter in parameters_of(net):
            if len(parameter.shape) == 2:
                parameter.grad_req = "add"
    found = []
    for step, rows in enumerate(program.rows):
        if step == program.later and step:
            norm = norm_of(program)
            norm.cast("float64")
            norm.initialize(mx.init.One(), ctx=contexts or mx.cpu())
            net.body.add(norm)
            trainer = Trainer(net.collect_params(), "sgd", settings)
        if step == program.frozen:
            net.body[0].weight.grad_req = "null"
        found += step_of(program, net, trainer, array(X[:rows]), rows)
        change(program, net, trainer)
    mx.nd.waitall()
    label = array([1.0] * len(X))
    return [*found, net(array(X), label)[0].asnumpy(), *state_of(net)]


def step_of(program, net, trainer, x, rows):
    label = array([float(k >= rows // 2) for k in range(rows)])
    if program.is_called_twice:
        x.attach_grad()
    with autograd.record():
        loss = array([0.0])
        if program.decays:  # before the call, in which ours update running statistics
            parameters = net.collect_params().values()
            loss = sum((p.data() ** 2).sum() for p in parameters)
        y, others = net(x, label)
        loss = loss + (y**2).sum() + sum((z * 3).sum() for z in others)
        if program.is_called_twice:
            loss = loss + (net(x * 2, 1 - label)[0]).sum()
    loss.backward()
    return [loss.asnumpy(), *([x.grad.asnumpy()] if program.is_called_twice else [])]


def change(program, net, trainer):
    parameters = parameters_of(net)
    if program.change == "clip":
        clip_gradients(net)
    if program.change == "own optimizer":
        for parameter in parameters:
            parameter.data()[:] -= 0.001 * parameter.grad()
    else:
        trainer.step(1)
    for parameter in parameters:
        if program.change == "set_data":
            parameter.set_data(parameter.data() * 0.9)
        if program.change == "in place":
            parameter.data()[:] = parameter.data() * 0.9


@gluon_1_only("arrays of mx.nd")
@random_test(programs(), 60)
def test_equals_one_device(program):
    results = results_of(program, cpus(program.contexts))
    assert_same(results, results_of(program, None))
