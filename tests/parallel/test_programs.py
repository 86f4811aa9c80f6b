"""Whole programs of one device run on several after make_parallel, with its results.

Each program trains a float64 net by plain MXNet on one device, and by make_parallel on
one and on three. What it returns has to be equal: results, gradients and parameters.
Random programs (test_random_nets.py) mix what is simpler.
"""

from functools import partial

from gluon_syncbn import (
    allow_plain_loop,
    check_replicas,
    make_parallel,
    revert_parallel,
)

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import Trainer, nn
from support.blocks import gluon_1_only, move
from support.helpers import MODES, cpus, set_mode, summed_grad, value
from support.parallel_nets import assert_same
from support.whole_programs import (
    Net,
    Normalized,
    X,
    array,
    backward,
    clip_gradients,
    dense,
    parameters_of,
    results_of,
    started,
)


class Scaled(gluon.Block):
    def __init__(self):
        super().__init__()
        self.dense, self.scale = dense(), array([1.0, 2.0])

    def forward(self, x):
        return self.dense(x) * self.scale.as_in_context(x.context)


def constant_that_is_written(start):
    """MXNet refuses that while the array is in a graph, so backward has to drop it."""
    net, found = start(Scaled(), "imperative"), []
    for factor in range(1, 4):
        with autograd.record():
            net.scale[:] = factor
            loss = (net(array(X)) ** 2).sum()
        loss.backward()
        found.append(loss.asnumpy())
    return found, net


def constant_parameter(start):
    class Shifted(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.dense = dense()
            value = np.array([[1.0, -1.0]])
            self.shift = self.params.get_constant("shift", value)

        def hybrid_forward(self, F, x, shift):
            return F.broadcast_add(self.dense(x), shift)

    net = start(Shifted())
    shift = array([[2.0, 3.0]])
    return [
        backward(lambda: ((net(array(X)) - net.shift.data() * shift) ** 2).sum())
    ], net


# ---- Between backward and step.


def trained(between, start, steps=3, net=None, **options):
    """Train a net; `between` is what the program does after each backward."""
    net = net or start(Normalized())
    settings = {"learning_rate": 0.01, "momentum": 0.9}
    trainer = Trainer(net.collect_params(), "sgd", settings, **options)
    for step in range(steps):
        backward(lambda: (net(array(X)) ** 2).sum())
        between(net, trainer, step)
        mx.nd.waitall()  # MXNet's own static_shape nets read statistics too early
    return [net(array(X)).asnumpy()], net  # the latest write counts from here on


def reduce_clip_update(net, trainer, step):
    trainer.allreduce_grads()
    clip_gradients(net)
    trainer.update(1)


def kept_arrays(net, trainer, step):
    """Write to arrays that the program got once."""
    if step == 0:
        net.kept = [parameter.data() for parameter in parameters_of(net)]
    trainer.step(6)
    for data in net.kept:
        data[:] = data * 0.5


def swap_for_an_average(net, trainer, step):
    """Predict with other weights, as EMA and SWA do, and put the weights back."""
    trainer.step(6)
    former = [parameter.data().copy() for parameter in parameters_of(net)]
    for parameter in parameters_of(net):
        parameter.data()[:] = 1
    net.predicted = net(array(X)).asnumpy()
    for parameter, data in zip(parameters_of(net), former):
        parameter.data()[:] = data


def load_again(net, trainer, step):
    trainer.step(6)
    mx.nd.waitall()  # MXNet's own static_shape nets write statistics too late
    if step == 0:
        net.save_parameters("parameters")
    elif step == 1:
        net.load_parameters("parameters")


BETWEEN = [
    reduce_clip_update,
    kept_arrays,
    swap_for_an_average,
    load_again,
]


def stale_branch(start):
    """Leave a head out in some steps, with ignore_stale_grad."""

    class Heads(gluon.Block):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.both = dense(), dense(), True

        def forward(self, x):
            return self.second(self.first(x)) if self.both else self.first(x)

    def step_of(net, trainer, step):
        trainer.step(6, ignore_stale_grad=True)
        net.both = False

    return trained(step_of, start, net=start(Heads(), "imperative"))


def norm_of_the_first_call(start):
    """Make a layer in the first call of a block, on the block's contexts."""

    class Lazy(gluon.Block):
        def __init__(self):
            super().__init__()
            self.dense, self.norm = dense(), None

        def forward(self, x):
            if self.norm is None:
                self.norm = nn.BatchNorm(in_channels=2, momentum=0.875)
                self.norm.cast("float64")
                self.norm.initialize(ctx=self.dense.weight.list_ctx())
            return self.norm(self.dense(x))

    net = start(Lazy(), "imperative")
    net(array(X))  # a first look; what trains later is converted
    return trained(lambda net, trainer, step: trainer.step(6), start, net=net)


PROGRAMS = [
    constant_that_is_written,
    pytest.param(constant_parameter, marks=gluon_1_only("a Constant is an attribute")),
    stale_branch,
    pytest.param(norm_of_the_first_call, marks=gluon_1_only("list_ctx")),
    *(partial(trained, between) for between in BETWEEN),
]


def name_of(program):
    return getattr(program, "__name__", None) or program.args[0].__name__


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_program(program, mode, count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = results_of(program, cpus(count), mode)
    assert_same(results, results_of(program, None, mode))


# ---- Plain loops.


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_plain_loop_whose_loss_reads_inputs_and_parameters(mode, count):
    """An autoencoder with a penalty, two calls of the net, and an array twice."""
    results = []
    for contexts in cpus(count), cpus(1):
        net = started(Net(dense(), function=lambda F, h: (h, [h])), None)
        move(net, contexts)
        set_mode(allow_plain_loop(net), mode)
        for _ in range(2):
            losses = []
            with autograd.record():
                for x in gluon.utils.split_and_load(array(X), contexts):
                    y, (again,) = net(x)
                    loss = ((y - x) ** 2).sum() + (again * net(x)[0]).sum()
                    for p in net.collect_params().values():
                        loss = loss + (p.data(x.context) ** 2).sum() / len(contexts)
                    losses.append(loss)
            autograd.backward(losses)
        total = sum(loss.asnumpy() for loss in losses)
        results.append([total, *map(summed_grad, parameters_of(net))])
    assert_same(*results)


# ---- Trainers.


TRAINERS = {
    "without kvstore": {"kvstore": None},
    "local": {"kvstore": "local", "update_on_kvstore": True},
    "on devices": {"kvstore": "device", "update_on_kvstore": False},
}


@pytest.mark.parametrize("options", TRAINERS.values(), ids=TRAINERS)
def test_trainer(options):
    program = partial(trained, stepped)
    expected = results_of(program, None)
    assert_same(results_of(partial(program, **options), cpus(2)), expected)
    options = {"kvstore": mx.kv.create("local")}
    assert_same(results_of(partial(program, **options), cpus(3)), expected)


def stepped(net, trainer, step):
    trainer.step(6)


@pytest.mark.parametrize("name", ["adam", "nadam", "sgld", "signum", "ftml"])
def test_optimizer(name):
    """Also one that draws random numbers, and one that counts all its updates."""

    def program(start):
        net = start(Net(dense(), dense()))
        trainer = Trainer(net.collect_params(), name, {"learning_rate": 0.01})
        for _ in range(3):
            backward(lambda: (net(array(X)) ** 2).sum())
            mx.random.seed(3)  # a call of the net may draw a seed for its devices
            trainer.step(6)
        return [], net

    assert_same(results_of(program, cpus(2)), results_of(program, None))


@pytest.mark.parametrize("change", [make_parallel, revert_parallel])
def test_momentum_stays_when_a_net_becomes_parallel_or_stops(change):
    """The net trains for two steps before the change and for two steps after it."""

    def program(contexts):
        is_parallel = change is revert_parallel and len(contexts) > 1
        net = started(Net(dense()), contexts if is_parallel else None)
        move(net, contexts)
        settings = {"learning_rate": 0.01, "momentum": 0.9}
        trainer = Trainer(net.collect_params(), "sgd", settings)
        for step in range(4):
            if step == 2 and len(contexts) > 1:
                change(net, *[contexts] * (not is_parallel))
                is_parallel = not is_parallel
            shards = gluon.utils.split_and_load(
                array(X), contexts[:1] if is_parallel else contexts
            )
            with autograd.record():
                losses = [(net(x) ** 2).sum() for x in shards]
            autograd.backward(losses)
            trainer.step(6)
        check_replicas(net)
        return [value(p) for p in parameters_of(net)]

    assert_same(program(cpus(2)), program(cpus(1)))


class OfHorovod(Trainer):
    """Sums the first device's gradients over processes, as Horovod's trainer does."""

    def _allreduce_grads(self):
        for parameter in self._params:
            if parameter.grad_req != "null":
                parameter.list_grad()[0][:] *= 2


def test_trainer_that_sums_one_gradient_over_processes():
    def program(cls, factor, start):
        net = start(Normalized())
        trainer = cls(net.collect_params(), "sgd", kvstore=None)
        backward(lambda: (net(array(X)) ** 2).sum() * factor)
        trainer.step(6)
        return [], net

    results = results_of(partial(program, OfHorovod, 1), cpus(2))
    assert_same(results, results_of(partial(program, Trainer, 2), None))
