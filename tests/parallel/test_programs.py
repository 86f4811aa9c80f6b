"""Whole programs of one device run on several after make_parallel, with its results.

Each program trains a float64 net by plain MXNet on one device, and by make_parallel on
one to three. What it returns has to be equal: results, gradients and parameters.
"""

from functools import partial

from gluon_syncbn import check_replicas, make_parallel, revert_parallel

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import Trainer, nn
from support.blocks import Function, gluon_1_only, move
from support.helpers import (
    MODES,
    assert_all_near,
    cpus,
    set_mode,
    summed_grad,
    value,
)
from support.nd import nd
from support.parallel_nets import assert_same

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
    """A net on its devices, with random parameters that are equal everywhere."""
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
    """Parameters, which are equal on all devices, and the gradients of the program."""
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


# ---- Arrays that several graphs share.


class Scaled(gluon.Block):
    def __init__(self):
        super().__init__()
        self.dense, self.scale = dense(), array([1.0, 2.0])

    def forward(self, x):
        return self.dense(x) * self.scale.as_in_context(x.context)


def constant_of_the_net(start):
    net = start(Scaled(), "imperative")
    return [backward(lambda: (net(array(X)) ** 2).sum()) for _ in range(2)], net


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


def parameters_in_the_loss(start):
    """Weight decay over all parameters, running statistics and frozen ones included."""
    net = start(Normalized())
    net.layers[2].weight.grad_req = "null"
    found = []
    for _ in range(2):
        with autograd.record():
            decay = sum((p.data() ** 2).sum() for p in net.collect_params().values())
            loss = (net(array(X)) ** 2).sum() + 0.5 * decay
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


def input_of_two_calls(start):
    net, other = start(Normalized()), start(Net(dense()), seed=2)
    x = array(X)
    return [backward(lambda: ((net(x) - other(x) + x) ** 2).sum())], net, other


# ---- Results.


def the_same_array_twice(start):
    net = start(Net(dense(), function=lambda F, h: (h, [h])), "imperative")

    def head():
        y, (z,) = net(array(X))
        return (y + 10 * z).sum()

    return [backward(head)], net


def recorded_on_some_devices(start):
    """Rows without a label have no loss, so a device may have no graph."""

    class NetWithLoss(gluon.Block):
        def __init__(self):
            super().__init__()
            self.dense = dense()

        def forward(self, x, label):
            if not label.asnumpy().any():
                return nd.zeros(len(x), ctx=x.context, dtype="float64")
            return ((self.dense(x) ** 2).sum(axis=1)) * label

    net, found = start(NetWithLoss(), "imperative"), []
    for labels in [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1]:
        found.append(backward(lambda y=labels: net(array(X), array(y)).sum()))
    return found, net


def frozen_after_a_step_of_two(start):
    """A GAN's phases: the second net is frozen, and its target needs no gradient."""
    first, second = start(Normalized()), start(Normalized(), seed=2)
    found = [backward(lambda: second(first(array(X))).sum())]
    for parameter in second.collect_params().values():
        parameter.grad_req = "null"

    def head():
        return ((second(first(array(X))) - second(array(X) * 2)) ** 2).sum()

    # A layer that is used twice updates its statistics twice, unlike MXNet's.
    return [*found, backward(head)], first


# ---- Between backward and step.


def trained(between, start, steps=3, net=None, **options):
    """The net after steps in which the program does something between the usual."""
    net = net or start(Normalized())
    settings = {"learning_rate": 0.01, "momentum": 0.9}
    trainer = Trainer(net.collect_params(), "sgd", settings, **options)
    for step in range(steps):
        backward(lambda: (net(array(X)) ** 2).sum())
        between(net, trainer, step)
        mx.nd.waitall()  # MXNet's own static_shape nets read statistics too early
    return [net(array(X)).asnumpy()], net  # what was written last counts from here on


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


def clip(net, trainer, step):
    clip_gradients(net)
    trainer.step(1)


def reduce_clip_update(net, trainer, step):
    trainer.allreduce_grads()
    clip_gradients(net)
    trainer.update(1)


def set_data(net, trainer, step):
    trainer.step(6)
    for parameter in parameters_of(net):
        parameter.set_data(parameter.data() * 0.5)


def write_in_place(net, trainer, step):
    """One array, as a program for one device has it."""
    trainer.step(6)
    for parameter in parameters_of(net):
        parameter.data()[:] = parameter.data() * 0.5


def own_optimizer(net, trainer, step):
    for parameter in parameters_of(net):
        parameter.data()[:] -= 0.01 * parameter.grad()


def kept_arrays(net, trainer, step):
    """Arrays that the program got once, and goes on writing to."""
    if step == 0:
        net.kept = [parameter.data() for parameter in parameters_of(net)]
    trainer.step(6)
    for data in net.kept:
        data[:] = data * 0.5


def swap_for_an_average(net, trainer, step):
    """Predictions with other weights, as of EMA and SWA, and back."""
    trainer.step(6)
    former = [parameter.data().copy() for parameter in parameters_of(net)]
    for parameter in parameters_of(net):
        parameter.data()[:] = 1
    net.predicted = net(array(X)).asnumpy()
    for parameter, data in zip(parameters_of(net), former):
        parameter.data()[:] = data


def accumulate(net, trainer, step):
    # MXNet 1.6 does not add the gradients of its own BatchNorm.
    weights = [p for p in parameters_of(net) if len(p.shape) == 2]
    if step == 0:
        for parameter in weights:
            parameter.grad_req = "add"
    elif step % 2:
        trainer.step(12)
        for gradient in sum((p.list_grad() for p in weights), []):
            gradient[:] = 0


def load_again(net, trainer, step):
    trainer.step(6)
    mx.nd.waitall()  # MXNet's own static_shape nets write statistics too late
    if step == 0:
        net.save_parameters("parameters")
    elif step == 1:
        net.load_parameters("parameters")


BETWEEN = [
    clip,
    reduce_clip_update,
    set_data,
    write_in_place,
    own_optimizer,
    kept_arrays,
    swap_for_an_average,
    accumulate,
    load_again,
]


def stale_branch(start):
    """A head that some steps leave out, with ignore_stale_grad."""

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


def later_norm(start):
    """A new head for fine-tuning, and a norm that the first call makes."""
    net = start(Net(dense()))
    net.layers.add(nn.BatchNorm(in_channels=2, momentum=0.875))
    net.cast("float64")
    net.layers[1].initialize(ctx=net.layers[0].weight.list_ctx())
    return trained(lambda net, trainer, step: trainer.step(6), start, net=net)


PROGRAMS = [
    constant_of_the_net,
    constant_that_is_written,
    parameters_in_the_loss,
    input_of_two_calls,
    the_same_array_twice,
    recorded_on_some_devices,
    frozen_after_a_step_of_two,
    pytest.param(constant_parameter, marks=gluon_1_only("a Constant is an attribute")),
    stale_branch,
    later_norm,
    *(partial(trained, between) for between in BETWEEN),
]


def name_of(program):
    return getattr(program, "__name__", None) or program.args[0].__name__


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_program(program, mode, count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = results_of(program, cpus(count), mode)
    assert_same(results, results_of(program, None, mode))


def results_of(program, contexts, mode="imperative"):
    def start(net, mode=mode, seed=1):
        return started(net, contexts, mode, seed)

    values, *nets = program(start)
    mx.nd.waitall()
    values = [*values, *(net.predicted for net in nets if hasattr(net, "predicted"))]
    return values + state_of(*nets)


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


def test_a_reverted_net_keeps_its_momentum_on_all_devices():
    """A loop over its devices then trains on as one device."""

    def program(contexts):
        net = started(Net(dense()), contexts)
        settings = {"learning_rate": 0.01, "momentum": 0.9}
        trainer = Trainer(net.collect_params(), "sgd", settings)
        for step in range(4):
            if step == 2 and contexts:
                revert_parallel(net)
            if step < 2:
                backward(lambda: (net(array(X)) ** 2).sum())
            else:
                places = contexts or [mx.cpu()]
                shards = gluon.utils.split_and_load(array(X), places)
                with autograd.record():
                    losses = [(net(x) ** 2).sum() for x in shards]
                autograd.backward(losses)
            trainer.step(6)
        check_replicas(net)
        return [value(p) for p in parameters_of(net)]

    assert_same(program(cpus(2)), program(None))


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


def test_trainer_that_was_made_before():
    """It has trained on several devices, and its momentum stays."""

    def program(contexts):
        net = started(Net(dense()), None)
        move(net, contexts)
        settings = {"learning_rate": 0.01, "momentum": 0.9}
        trainer = Trainer(net.collect_params(), "sgd", settings)
        for step in range(4):
            if step == 2 and len(contexts) > 1:
                make_parallel(net, contexts)
            if step < 2:
                shards = gluon.utils.split_and_load(array(X), contexts)
                with autograd.record():
                    losses = [(net(x) ** 2).sum() for x in shards]
                autograd.backward(losses)
            else:
                backward(lambda: (net(array(X)) ** 2).sum())
            trainer.step(6)
        return [value(p) for p in parameters_of(net)]

    assert_same(program(cpus(2)), program(cpus(1)))


# ---- What cannot be right on several devices is refused.


class Kept(gluon.HybridBlock):
    """A penalty that is kept in an attribute."""

    def __init__(self):
        super().__init__()
        self.dense = dense()

    def hybrid_forward(self, F, x):
        h = self.dense(x)
        self.penalty = (h**2).sum()
        return h


class Reads(gluon.Block):
    """An attribute that has a gradient, or depends on an array with one."""

    def __init__(self, given):
        super().__init__()
        self.dense, self.given = dense(), given

    def forward(self, x):
        given = self.given
        if isinstance(given, list):
            given = given[0].data(x.context)
        return self.dense(x) * given.as_in_context(x.context)


def loss_of_an_attribute(net, x):
    net(x)
    return net.penalty


def loss_with_an_attribute(net, x):
    return net(x).sum() + net.penalty.as_in_context(mx.cpu())


def loss_of_a_hook(net, x):
    found = []
    net.dense.register_forward_hook(lambda block, inputs, output: found.append(output))
    return net(x).sum() + found[0].sum()


@gluon_1_only("hybrid_forward")
@pytest.mark.parametrize(
    "loss", [loss_of_an_attribute, loss_with_an_attribute, loss_of_a_hook]
)
def test_loss_that_reads_what_a_device_has_kept(loss):
    net = started(Kept(), cpus(2))
    with autograd.record():
        total = loss(net, array(X))
    with pytest.raises(ValueError, match=rf"{net.name} computed on a device, but did"):
        total.backward()


@gluon_1_only("hybrid_forward")
def test_penalty_of_the_one_device_that_has_rows():
    """It is that of the whole batch."""
    results = []
    for contexts in cpus(2), None:
        net = started(Kept(), contexts)
        backward(lambda net=net: loss_with_an_attribute(net, array(X[:1])))
        results.append(state_of(net))
    assert_same(*results)


@gluon_1_only("Block.params")
@pytest.mark.parametrize("way", ["variable", "recorded", "parameter"])
def test_net_that_reads_a_variable_that_is_no_argument(way):
    delta = array([[1.0, 1]])
    if way == "parameter":
        parameter = gluon.Parameter("delta", shape=(1, 2), dtype="float64")
        parameter.initialize(ctx=cpus(2))
        delta = [parameter]
    else:
        delta.attach_grad()
    net = started(Reads(delta), cpus(2))
    words = rf"the attribute 'given' of {net.name}, which depends on a variable"
    with pytest.raises(ValueError, match=words), autograd.record():
        if way == "recorded":
            net.given = delta * 2
        net(array(X))


def mean(F, h):
    return h.mean()


def similarities(F, h):
    return F.dot(h, h, transpose_b=True)


def rows_last(F, h):
    return F.transpose(F.expand_dims(h, axis=0), axes=(2, 1, 0))


@pytest.mark.parametrize("rows", [2, 4, 5])
@pytest.mark.parametrize("function", [mean, similarities, rows_last])
def test_result_whose_length_is_that_of_the_rows_by_chance(function, rows):
    net = started(Net(dense(), function=function), cpus(2))
    with pytest.raises(ValueError, match=r"has shape|\*, \d.*, expected the same"):
        with autograd.record():
            net(array(X[:rows]))


@pytest.mark.parametrize("train", [True, False])
def test_the_look_for_rows_changes_nothing(train):
    """It is one more call, on one device, of the first batch that is even."""
    results = []
    for contexts in cpus(2), cpus(1):
        net = started(Normalized(), contexts, "hybridize")
        with autograd.record(train_mode=train):
            y = net(array(X[:4]))
        results.append([y.asnumpy(), *map(value, net.collect_params().values())])
    assert_same(*results)


@gluon_1_only("hybrid_forward")
def test_the_look_for_rows_is_before_the_call():
    """What a net keeps is of the call: here of two devices, the second one's rows."""
    net = started(Kept(), cpus(2))
    net(array(X[:4]))
    h = net.dense(array(X[2:4]))
    assert_same([net.penalty.asnumpy()], [(h**2).sum().asnumpy()])


@pytest.mark.parametrize("mode", MODES)
def test_the_look_for_rows_draws_no_random_numbers(mode):
    net = started(Net(dense(), nn.Dropout(0.5)), cpus(2), mode)
    masks = []
    for _ in range(2):  # the second call does not look
        mx.random.seed(5)
        with autograd.train_mode():
            masks.append(net(array(X)).asnumpy())
    assert (masks[0] == 0).any() and (masks[0] == masks[1]).all()


def test_a_loop_over_shards_is_refused():
    net = started(Normalized(), cpus(2))
    shards = gluon.utils.split_and_load(array(X), cpus(2))
    with pytest.raises(ValueError, match=r"cpu\(1\) in one block.*the whole batch"):
        with autograd.record():
            [net(x) for x in shards]
    for x in shards:  # predictions of each are right
        assert net(x).shape == (3, 2)


@gluon_1_only("mx.npx.set_np")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_variable", [True, False])
def test_argument_without_axes(is_variable, mode):
    """A temperature, which NumPy semantics have."""

    class Scaled(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.dense = dense()

        def hybrid_forward(self, F, x, temperature):
            return self.dense(x) * temperature

    results = []
    for contexts in cpus(2), None:
        with mx.util.np_shape(True), mx.util.np_array(True):
            net = set_mode(Scaled(), mode)
            if contexts:
                make_parallel(net, contexts)
            net.initialize(mx.init.One(), ctx=contexts or mx.cpu())
            temperature = mx.np.array(3.0)
            if is_variable:
                temperature.attach_grad()
            with autograd.record():
                loss = (net(mx.np.array(X), temperature) ** 2).sum()
            loss.backward()
            found = [loss.asnumpy(), summed_grad(net.dense.weight)]
            if is_variable:
                found.append(temperature.grad.asnumpy())
        results.append(found)
    assert_all_near(*results, dtype="float32", count=50)
