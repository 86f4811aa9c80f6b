"""A step that fails has updated everything, or nothing."""

import threading
from contextlib import suppress

import gluon_syncbn
from gluon_syncbn.nested import arrays_in

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.helpers import Loop, X, make_layer, set_mode
from support.nd import nd

PLACES = "forward", "loss", "backward", "step", "end"  # where an exception is raised
CONTEXTS = [mx.cpu(0), mx.cpu(1)]
LONG, SHORT = 20, 0.3  # timeouts in seconds, of steps that succeed and that fail


class Program:
    """A training program with make_parallel, Devices.map or a plain loop."""

    def __init__(self, way, mode, optimizer, kvstore, on_kvstore):
        self.way, self.driver, self.losses = way, Loop(CONTEXTS), []
        norm = gluon_syncbn.SyncBatchNorm(in_channels=4)  # used twice
        self.net = nn.HybridSequential()
        self.net.add(nn.Dense(4, in_units=3), norm, nn.Dense(4, in_units=4), norm)
        self.net.add(nn.Dense(3, in_units=4))
        self.net.initialize(ctx=CONTEXTS)
        self.parameters = list(self.net.collect_params().values())
        settings = {"learning_rate": 0.1}
        stores = {"kvstore": kvstore, "update_on_kvstore": on_kvstore}
        # A dict would be sorted by names, where "dense10" comes before "dense9".
        self.trainer = gluon.Trainer(self.parameters, optimizer, settings, **stores)
        if way == "make_parallel":
            gluon_syncbn.make_parallel(self.net, ctx=CONTEXTS)
            self.driver = Loop(CONTEXTS[:1])
        elif way == "plain loop":
            gluon_syncbn.allow_plain_loop(self.net)
        else:
            self.driver = gluon_syncbn.Devices(CONTEXTS)
        set_mode(self.net, mode)
        rng = np.random.default_rng(0)
        for p in self.parameters:
            p.set_data(nd.array(rng.uniform(0.1, 0.5, p.shape)))

    def queue(self, number, strike=lambda place, context: None):
        """Queue a step; `strike` is called at each place."""
        rng = np.random.default_rng(number)
        batch = nd.array(rng.normal(size=(6, 3))), nd.arange(6) % 3
        contexts = self.driver.contexts
        shards = (gluon.utils.split_and_load(array, contexts) for array in batch)
        criterion = gluon.loss.SoftmaxCrossEntropyLoss()

        def loss_of(x, label):
            # Layers do not synchronize in prediction, so the other context times out.
            is_absent = strike("forward", x.context) == "absent"
            with autograd.predict_mode() if is_absent else autograd.train_mode():
                y = self.net(x)
            strike("loss", x.context)
            return criterion(y, label)

        with autograd.record():
            losses = self.losses = self.driver.map(loss_of, *shards)
        strike("backward", None)
        if self.way == "map":
            self.driver.map(lambda loss: loss.backward(), losses)
        else:
            autograd.backward(losses)
        strike("step", None)
        self.trainer.step(6)
        strike("end", None)

    def run(self, number, strike=lambda place, context: None):
        """Do a step, and raise the error of its losses and of its update."""
        self.queue(number, strike)
        for loss in self.losses:
            loss.wait_to_read()
        for parameter in self.parameters:
            parameter.data(CONTEXTS[0]).wait_to_read()

    def optimizer_arrays(self):
        owners = self.trainer._updaters
        if self.trainer._update_on_kvstore:
            owners = [self.trainer._kvstore._updater]
        return arrays_in([owner.states for owner in owners])

    def snapshot(self):
        """Return the bits of all learned values; the optimizer's change later bits."""
        mx.nd.waitall()
        for p in self.parameters:
            for array in p.list_data():
                assert np.isfinite(array.asnumpy()).all()
        learned = [p.list_data() for p in self.parameters if p.grad_req != "null"]
        return [array.asnumpy().tobytes() for arrays in learned for array in arrays]


def saboteur(program, kind, place, number):
    """Return a function `strike` that makes a step fail in one of four ways."""
    victim = CONTEXTS[number % 2]

    def strike(where, context):
        if kind in ("absent", "read") and where == "forward" and context == victim:
            return "absent"  # the context misses an exchange
        if kind == "read" and where == "step":  # then MXNet forgets the error
            with suppress(mx.MXNetError):
                program.losses[1 - number % 2].wait_to_read()
        if kind == "exception" and where == place and context in (victim, None):
            raise ArithmeticError(place)
        if kind == "cancelled" and where == "step":
            thread = threading.Thread(target=gluon_syncbn.recover)
            thread.start()
            thread.join()

    return strike


def fail(program, kind, place, number):
    """Let a step fail, read the optimizer's arrays if `number` is odd, and recover."""
    gluon_syncbn.set_timeout(SHORT)
    with suppress(mx.MXNetError, ArithmeticError):
        program.run(number, saboteur(program, kind, place, number))
    for array in program.optimizer_arrays() if number % 2 else []:
        with suppress(mx.MXNetError):
            array.asnumpy()
    gluon_syncbn.recover()
    gluon_syncbn.set_timeout(LONG)


@pytest.mark.parametrize(
    "way, mode, optimizer, kvstore, on_kvstore, kind",
    [
        ("make_parallel", "imperative", "sgd", None, None, "exception"),
        ("make_parallel", "static_shape", "adam", "device", False, "cancelled"),
        ("map", "hybridize", "adagrad", "local", True, "absent"),
        ("map", "static_alloc", "adam", "device", False, "read"),
        ("plain loop", "hybridize", "adam", "local", True, "absent"),
    ],
)
def test_a_step_changes_all_or_nothing(way, mode, optimizer, kvstore, on_kvstore, kind):
    setting = way, mode, optimizer, kvstore, on_kvstore
    right, program = Program(*setting), Program(*setting)
    snapshots, undone = [right.snapshot()], set()
    for number, place in enumerate(PLACES):
        right.run(number)
        snapshots.append(right.snapshot())
        fail(program, kind, place, number)
        found = program.snapshot()
        assert found in snapshots[-2:], f"step {number}: neither old nor new values"
        if found == snapshots[-2]:
            undone.add(number)
            program.run(number)
        assert program.snapshot() == snapshots[-1], f"step {number}: wrong values"
    assert undone
    for each in right, program:
        each.run(len(PLACES))
    assert program.snapshot() == right.snapshot()


def test_a_plain_loop_that_was_left_between_two_contexts():
    """A new pass of the loop cancels the unfinished one long before the timeout."""
    gluon_syncbn.set_timeout(1000)
    setting = "plain loop", "static_shape", "adam", "device", False
    right, program = Program(*setting), Program(*setting)
    for number in range(3):
        right.run(number)
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                program.queue(number, saboteur(program, "exception", "loss", 0))
        program.queue(number)
    assert program.snapshot() == right.snapshot()


def test_a_trainers_first_step_waits_for_the_first_forward(devices):
    """The step copies running statistics, which the pending forward will write."""
    layer = set_mode(make_layer(devices.contexts, timeout=0.3), "static_shape")
    trainer = gluon.Trainer(layer.collect_params(), "sgd")
    with autograd.record():
        devices.map_first(layer, devices.split(X)[:1])
    with pytest.raises(mx.MXNetError, match=r"Missing: cpu\(1\)"):
        trainer.step(1)
