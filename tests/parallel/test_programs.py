"""Programs of one device give the same results on several devices.

The expected results are computed on one device without gluon_syncbn. Nets, losses and
steps are random. GLUON_SYNCBN_PROGRAMS=10000 runs 10000 programs.
"""

import os
import random
from functools import partial
from tempfile import NamedTemporaryFile
from types import SimpleNamespace

from gluon_syncbn import (
    allow_plain_loop,
    check_replicas,
    convert_sync_batchnorm,
    make_parallel,
    revert_parallel,
)

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import Trainer, nn
from support.blocks import gluon_1_only, move
from support.helpers import MODES, cpus, differentiate, set_mode, summed_grad, value
from support.nets import (
    Net,
    Normalized,
    X,
    array,
    assert_same,
    dense,
    parameters_of,
    started,
    state_of,
)

SEEDS = range(int(os.environ.get("GLUON_SYNCBN_PROGRAMS", 60)))

# Actions after each backward. All but the last one include a step of the trainer.
CHANGES = (
    *("nothing", "clip", "reduce and clip", "set_data", "in place", "kept arrays"),
    *("average", "load", "own optimizer"),
)


def draw(rng):
    def flag():
        return rng.random() < 0.5

    return SimpleNamespace(
        contexts=rng.choice([1, 2, 2, 3]),
        mode=rng.choice(list(MODES)),  # the mode of the net's body
        rows=[rng.randint(2, 6) for _ in range(rng.randint(1, 4))],  # each step's rows
        change=rng.choice(CHANGES),
        # "write" and "add": all inputs have a gradient, with this grad_req.
        inputs=rng.choice(["none", "write", "add", "last"]),
        # "fed back": called again with the result of another net.
        calls=rng.choice(["once", "once", "twice", "fed back"]),
        is_doubled=flag(),  # the result holds an array twice
        branches=rng.random() < 0.2,  # a shard whose labels are all 0 has no graph
        decays=flag(),  # the loss has the squares of all parameters
        accumulates=flag(),  # grad_req="add"
        clips_on_last=flag(),  # the last context is current while gradients are clipped
        leaves_head=flag(),  # the last layer is used in the first step only
        later=rng.randint(0, 4),  # the step before which a layer is added; 0 for none
        frozen=rng.randint(1, 4),  # the step before which the first weight is frozen
    )


def norm_of(program):
    """Return a BatchNorm, or a Dense for programs that cannot have a BatchNorm.

    If a net is called twice, nn.BatchNorm updates its statistics for the second call
    first, but our layer does not. If a device has no backward, our layers wait for it.
    """
    if program.calls != "once" or program.branches:
        return dense()
    return nn.BatchNorm(in_channels=2, momentum=0.875)


class RandomNet(gluon.Block):
    """A net that also reads an attribute and a constant without gradients."""

    def __init__(self, program):
        super().__init__()
        self.program, self.body = program, nn.HybridSequential()
        self.body.add(dense(), norm_of(program), dense())
        self.head, self.has_head = dense(), True
        self.scale = array([1.0, -2.0])
        self.shift = self.params.get_constant("shift", np.ones((1, 2)))

    def forward(self, x, label):
        h = self.body(x)
        h = self.head(h) if self.has_head else h
        h = h * self.scale.as_in_context(x.context) - self.shift.data(x.context)
        if self.program.branches and not label.asnumpy().any():
            h = h.detach()
        h = h * label.reshape((-1, 1))
        return (h, [h]) if self.program.is_doubled else (h, [])


def results_of(program, contexts):
    nets = started(RandomNet(program), contexts), started(dense(), contexts, seed=2)
    net, other = nets
    set_mode(net.body, program.mode)
    settings = {"learning_rate": 1e-5, "momentum": 0.5}
    trainer = Trainer(net.collect_params(), "sgd", settings)
    if program.accumulates:
        # MXNet 1.6 does not add the gradients of its own BatchNorm.
        for parameter in parameters_of(net):
            if len(parameter.shape) == 2:
                parameter.grad_req = "add"
    kept = {}
    if program.change == "kept arrays":
        kept.update((p, p.data()) for p in parameters_of(net))
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
        net.has_head = not (program.leaves_head and step)
        found += step_of(program, net, other, step, rows)
        on_last = contexts and program.clips_on_last and "clip" in program.change
        with contexts[-1] if on_last else mx.cpu():
            found += change(program, net, trainer, kept)
    mx.nd.waitall()
    return [*found, prediction(net), *state_of(*nets)]


def step_of(program, net, other, step, rows):
    x, label = array(X[:rows]), array([float(k >= rows // 2) for k in range(rows)])
    factor, kind = array([0.5]), program.inputs
    # A gradient of the label needs a graph of each shard, which `branches` may lack.
    own = [] if program.branches else [label]
    variables = {"none": [], "last": own}.get(kind, [x, factor, *own])
    if kind == "last":
        x.attach_grad("null")
    for variable in variables:
        variable.attach_grad("add" if kind == "add" else "write")
        variable.grad[:] = 0.25
    with autograd.record():
        net.scale[:] = step + 1  # MXNet raises if it is still in a graph
        loss = (x * 10).sum()
        if program.decays:  # before the call, which updates running statistics
            parameters = net.collect_params().values()
            loss = loss + sum((p.data() ** 2).sum() for p in parameters)
        y, others = net(x if kind == "last" else x * factor, label)
        loss = loss + (y**2).sum() + sum((z * 3).sum() for z in others)
        heads = [loss]
        if program.calls == "twice":
            heads.append(net(x * 2, 1 - label)[0].sum() + loss)
        if program.calls == "fed back":
            h = other(y)
            heads.append(net(h, label)[0].sum() + other(h * 1).sum())
    autograd.backward(heads)
    return [a.asnumpy() for a in (*heads, *(v.grad for v in variables))]


def prediction(net):
    return net(array(X), array([1.0] * len(X)))[0].asnumpy()


def change(program, net, trainer, kept):
    """Update the parameters; return the result of `average`, or an empty list."""
    parameters, kind = parameters_of(net), program.change
    if kind == "reduce and clip":
        trainer.allreduce_grads()
    if "clip" in kind:
        clip_gradients(parameters)
    if kind == "own optimizer":
        for parameter in parameters:
            parameter.data()[:] -= 1e-5 * parameter.grad()
    elif kind == "reduce and clip":
        trainer.update(1, ignore_stale_grad=True)
    else:
        trainer.step(1, ignore_stale_grad=True)
    arrays = [kept[parameter] for parameter in parameters if parameter in kept]
    for parameter in parameters:
        if kind == "set_data":
            parameter.set_data(parameter.data() * 0.9)
        if kind in ("in place", "load"):
            arrays.append(parameter.data())
    if kind == "load":
        mx.nd.waitall()  # MXNet's own static_shape nets write statistics too late
        with NamedTemporaryFile() as file:
            net.save_parameters(file.name)
            scale(arrays)
            net.load_parameters(file.name)
        return []
    scale(arrays)
    return average(net, parameters) if kind == "average" else []


def scale(arrays):
    for data in arrays:
        data[:] = data * 0.9


def average(net, parameters):
    """Predict with other weights, as EMA and SWA do, and put the weights back."""
    former = [parameter.data().copy() for parameter in parameters]
    for parameter in parameters:
        parameter.data()[:] = 1
    found = prediction(net)
    for parameter, data in zip(parameters, former):
        parameter.data()[:] = data
    return [found]


def clip_gradients(parameters):
    """Set the global norm to 0.5; gluon.utils.clip_global_norm needs float32."""
    gradients = [parameter.grad() for parameter in parameters]
    norm = sum((gradient.asnumpy() ** 2).sum() for gradient in gradients) ** 0.5
    for gradient in gradients:
        gradient *= 0.5 / norm


@gluon_1_only("arrays of mx.nd")
@pytest.mark.parametrize("seed", SEEDS)
def test_random_program(seed):
    program = draw(random.Random(seed))
    print(program)  # pytest shows it after a failure
    results = results_of(program, cpus(program.contexts))
    assert_same(results, results_of(program, None))


@pytest.mark.parametrize("mode", MODES)
def test_plain_loop_whose_loss_reads_inputs_and_parameters(mode):
    """The net is called twice and returns an array twice.

    The second step has one backward for each context.
    """
    results = []
    for contexts in cpus(2), cpus(1):
        net = started(Normalized(function=lambda F, h: (h, [h])), None)
        move(net, contexts)
        if len(contexts) > 1:
            allow_plain_loop(convert_sync_batchnorm(net))
        set_mode(net, mode)
        for is_together in True, False:
            losses = []
            with autograd.record():
                for x in gluon.utils.split_and_load(array(X), contexts):
                    y, (again,) = net(x)
                    loss = ((y - x) ** 2).sum() + (again * net(x)[0]).sum()
                    for p in parameters_of(net):
                        loss = loss + (p.data(x.context) ** 2).sum() / len(contexts)
                    losses.append(loss)
            for heads in [losses] if is_together else [[loss] for loss in losses]:
                autograd.backward(heads)
        total = sum(loss.asnumpy() for loss in losses)
        results.append([total, *map(summed_grad, parameters_of(net))])
    assert_same(*results)


@pytest.mark.parametrize("kind", ["chain", "own target"])
def test_plain_loop_of_converted_nets_after_a_prediction(kind):
    """Graphs of static_shape share resources of the thread that queues them."""
    results = []
    for contexts in cpus(2), cpus(1):
        nets = [started(Normalized(), None, seed=seed) for seed in (1, 2)]
        for net in nets:
            move(net, contexts)
            if len(contexts) > 1:
                set_mode(convert_sync_batchnorm(net), "static_shape")
        first, second = nets
        shards, found = gluon.utils.split_and_load(array(X), contexts), []
        for x in shards:
            second(first(x)).wait_to_read()
        for _ in range(3):
            losses = []
            with autograd.record():
                for x in shards:
                    with autograd.predict_mode():
                        target = first(x).detach() if kind == "own target" else 0
                    y = first(x) if kind == "own target" else second(first(x))
                    losses.append(((y - target) ** 2).sum())
            autograd.backward(losses)
            found.append(sum(loss.asnumpy() for loss in losses))
        used = nets if kind == "chain" else nets[:1]
        found += [summed_grad(p) for net in used for p in parameters_of(net)]
        results.append(found)
    assert_same(*results)


# ---- Trainers.


class OfHorovod(Trainer):
    """Doubles the first device's gradients, like Horovod's sum over two processes."""

    def _allreduce_grads(self):
        for parameter in self._params:
            if parameter.grad_req != "null":
                parameter.list_grad()[0][:] *= 2


TRAINERS = {
    "without kvstore": (Trainer, {"kvstore": None}),
    "local": (Trainer, {"kvstore": "local", "update_on_kvstore": True}),
    "on devices": (Trainer, {"kvstore": "device", "update_on_kvstore": False}),
    "a kvstore": (Trainer, {"kvstore": mx.kv.create("local")}),
    "of Horovod": (OfHorovod, {"kvstore": None}),
}
# sgld draws random numbers; nadam counts all its updates.
OPTIMIZERS = "adam", "nadam", "sgld", "signum", "ftml"


@pytest.mark.parametrize(
    "kind, optimizer",
    [(name, "sgd") for name in TRAINERS] + [("local", name) for name in OPTIMIZERS],
)
def test_trainer(kind, optimizer):
    results, (make, options) = [], TRAINERS[kind]
    for contexts in cpus(2), None:
        net = started(Net(dense(), dense()), contexts)
        parameters = net.collect_params()
        trainer = make(parameters, optimizer, **(options if contexts else {}))
        for _ in range(3):
            differentiate(lambda net: (net(array(X)) ** 2).sum(), net)
            mx.random.seed(3)  # a call of the net may draw a seed for its devices
            trainer.step(6)
        results.append(state_of(net))
    assert_same(*results)


BOTH, ONE = cpus(2), cpus(1)
CHANGES_OF_NETS = {  # a change, and the contexts of the inputs before and after it
    "becomes parallel": (partial(make_parallel, ctx=BOTH), BOTH, ONE),
    "moves to both": (partial(make_parallel, ctx=BOTH, reset_ctx=True), ONE, ONE),
    "is reverted": (revert_parallel, ONE, BOTH),
}


@pytest.mark.parametrize("kind", CHANGES_OF_NETS)
def test_momentum_stays_when_a_net_becomes_parallel_or_is_reverted(kind):
    """The net trains for two steps before the change and for two steps after it."""

    def program(change, before, after):
        net = started(Net(dense()), BOTH if change is revert_parallel else None)
        if change is not revert_parallel:
            move(net, before)
        settings = {"learning_rate": 0.01, "momentum": 0.9}
        trainer = Trainer(net.collect_params(), "sgd", settings)
        for step, contexts in enumerate((before, before, after, after)):
            if step == 2 and change:
                change(net)
            with autograd.record():
                shards = gluon.utils.split_and_load(array(X), contexts)
                losses = [(net(x) ** 2).sum() for x in shards]
            autograd.backward(losses)
            trainer.step(6)
        check_replicas(net)
        return [value(p) for p in parameters_of(net)]

    assert_same(program(*CHANGES_OF_NETS[kind]), program(None, ONE, ONE))
