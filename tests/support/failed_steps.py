"""Training steps that fail on purpose, and the states that they must leave.

A run without a failure gives the state after each step. A failed step has to leave one
of the two states around it, bit by bit, and the steps that follow have to lead where
they lead without it. Only running statistics may have a failed batch's share, which is
finite; they are set to what they are without it.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress

import gluon_syncbn
from gluon_syncbn import distributed
from gluon_syncbn.common.nested import arrays_in
from gluon_syncbn.distributed import meeting
from gluon_syncbn.native import failures

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from support.helpers import MODES, Loop, set_mode

OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3},
    "adam": {"learning_rate": 0.01},
    "adagrad": {"learning_rate": 0.01},  # it writes its states before the weights
    "decoupleddecay": {"learning_rate": 0.1},
}
STORES = ("device", None), ("device", False), ("local", True)
STEPS, ROWS = 4, 6
LONG, SHORT = 20, 0.3  # timeouts in seconds, of steps that succeed and that fail


class Net(nn.HybridBlock):
    """Branches between norms, one of which is used twice."""

    def __init__(self):
        super().__init__(prefix="net_")  # parameters keep their order by name
        with self.name_scope():
            self.first, self.left, self.right = (
                nn.HybridSequential() for _ in range(3)
            )
            for part, momentum in (self.first, 0.9), (self.left, 0.5), (self.right, 0):
                norm = gluon_syncbn.SyncBatchNorm(momentum=momentum)
                part.add(nn.Conv2D(4, 3, padding=1), norm)
            self.twice, self.last = gluon_syncbn.SyncBatchNorm(), nn.Dense(3)

    def hybrid_forward(self, F, x):
        h = F.relu(self.first(x))
        h = self.twice(self.twice(self.left(h)) + self.right(h))
        return self.last(F.mean(h, axis=(2, 3)))


class Program:
    """A training program: a net, its trainer, and one of the ways to drive devices.

    `participants` are the contexts or ranks of which one may fail.
    """

    def __init__(self, way, mode, optimizer, store):
        self.setting = way, mode, optimizer, store
        self.way, self.contexts = way, [mx.cpu(0), mx.cpu(1)]
        self.participants = self.own = self.contexts
        net = template = Net()
        self.driver = Loop(self.contexts)
        if way == "make_parallel":
            net = gluon_syncbn.make_parallel(net, ctx=self.contexts)
            self.driver = Loop([mx.cpu(0)])
        elif way == "allow_plain_loop":
            gluon_syncbn.allow_plain_loop(net)
        elif way == "map":
            self.driver = gluon_syncbn.Devices(self.contexts)
        elif way == "ranks":
            self.contexts = [mx.cpu(0)]
            self.own, self.participants = [distributed.rank()], [0, 1]
            self.driver = Loop(self.contexts)
        net.initialize(ctx=self.contexts)
        self.net = net
        with autograd.predict_mode():
            for context in self.contexts:
                template(mx.nd.ones((2, 3, 4, 4), ctx=context)).wait_to_read()
        set_mode(net, mode)
        rng = np.random.RandomState(0)
        for _, p in sorted(net.collect_params().items()):
            p.set_data(mx.nd.array(rng.uniform(0.1, 0.5, p.shape)))
        mx.nd.waitall()
        arguments = OPTIMIZERS[optimizer]
        if way == "ranks":
            self.trainer = distributed.Trainer(net, optimizer, arguments)
        else:
            options = dict(zip(("kvstore", "update_on_kvstore"), store))
            parameters = net.collect_params()
            self.trainer = gluon.Trainer(parameters, optimizer, arguments, **options)
        self.loss = gluon.loss.SoftmaxCrossEntropyLoss()

    def batch(self, number):
        """Images and labels, those of this rank if there are several."""
        rng = np.random.RandomState(1000 + number)
        x, y = rng.normal(size=(ROWS, 3, 4, 4)), np.arange(ROWS) % 3
        if self.way == "ranks":
            x, y = (np.split(array, 2)[distributed.rank()] for array in (x, y))
        return mx.nd.array(x), mx.nd.array(y)

    def queue(self, number, saboteur=None):
        """Queues a step, and returns its losses."""
        batch, contexts = self.batch(number), self.driver.contexts
        shards = (gluon.utils.split_and_load(array, contexts) for array in batch)
        saboteur = saboteur or (lambda *_: None)
        anybody = self.own[0] if self.way == "ranks" else None

        def outputs(data, label, context):
            # Outside of training mode a context's layers leave the others alone.
            is_absent = saboteur("forward", context) == "absent"
            with autograd.predict_mode() if is_absent else autograd.train_mode():
                output = self.net(data)
            saboteur("loss", context)
            return self.loss(output, label)

        with autograd.record():
            losses = self.driver.map(outputs, *shards, self.own)
        saboteur("backward", anybody)
        if self.way == "map":
            self.driver.map(lambda loss: loss.backward(), losses)
        else:
            autograd.backward(losses)
        saboteur("step", anybody)
        self.trainer.step(len(batch[0]))
        saboteur("end", anybody)
        return losses

    def run(self, number, saboteur=None):
        """Makes a step, and reads its losses; its update may still be in flight."""
        for loss in self.queue(number, saboteur):
            loss.wait_to_read()

    def finish(self):
        """Waits for the update of the latest step, and raises its error."""
        for parameter in self.net.collect_params().values():
            parameter.data(self.contexts[0]).wait_to_read()

    def try_to_read(self, rng):
        """Reads some arrays, as a program that saves before it calls recover()."""
        parameters = list(self.net.collect_params().values())
        arrays = [array for p in parameters for array in p.list_data()]
        arrays += [g for p in parameters if p.grad_req != "null" for g in p.list_grad()]
        arrays += [a for states in self._states().values() for a in states]
        for array in rng.sample(arrays, 4):
            with suppress(mx.MXNetError):
                array.asnumpy()

    def statistics(self):
        """The running statistics, by name."""
        mx.nd.waitall()
        return {
            name: [array.asnumpy() for array in p.list_data()]
            for name, p in self.net.collect_params(".*running.*").items()
        }

    def set_statistics(self, statistics):
        """Those of now are finite, in any case."""
        for name, p in self.net.collect_params(".*running.*").items():
            # Not by set_data, after which a kvstore has forgotten its states.
            for array, value in zip(p.list_data(), statistics[name]):
                assert np.isfinite(array.asnumpy()).all(), f"{self.setting}: {name}"
                array[:] = value

    def state(self):
        """All that an update changes, as bytes by name."""
        mx.nd.waitall()
        state = {
            f"{k} {array.context}": array.asnumpy().tobytes()
            for k, p in enumerate(self.net.collect_params().values())
            for array in p.list_data()
            if p.grad_req != "null"
        }
        optimizer = self.trainer._optimizer
        state["updates"] = optimizer.num_update
        for device, counts in optimizer._all_index_update_counts.items():
            state[f"updates {device}"] = {i: c for i, c in counts.items() if c}
        for name, arrays in self._states().items():
            bits = b"".join(array.asnumpy().tobytes() for array in arrays)
            if any(bits):  # untouched ones are zero
                state[name] = bits
        return {k: v for k, v in state.items() if v}

    def _states(self):
        """The optimizer's arrays, by a name for each device and parameter."""
        trainer = self.trainer
        owners = trainer._updaters
        if trainer._update_on_kvstore:
            owners = [trainer._kvstore._updater]
        return {
            f"state {device} {index}": arrays_in([value])
            for device, owner in enumerate(owners)
            for index, value in owner.states.items()
        }


@mx.optimizer.register
class DecoupledDecay(mx.optimizer.Optimizer):
    """Most of its operations read no gradient."""

    def create_state(self, index, weight):
        return mx.nd.zeros_like(weight)

    def update(self, index, weight, grad, state):
        self._update_count(index)
        state *= 0.9
        state += 0.1 * self.rescale_grad * grad
        weight *= 0.99
        weight -= self.lr * state


class UsersMistake(Exception):
    """What a program raises by itself."""


def saboteur(kind, rng, contexts):
    """A function that lets one step fail; Program.queue calls it at some places."""
    where = rng.choice(["forward", "loss", "backward", "step", "end"])
    victim, seconds = rng.choice(contexts), rng.random() * 0.02

    def strike(place, context):
        is_here = place == where and context in (victim, None)
        if kind == "exception" and is_here and place != "end":
            raise UsersMistake(place)
        if kind == "absent" and place == "forward" and context == victim:
            return "absent"
        if kind == "ended" and is_here:
            time.sleep(seconds)
            failures.end_waits("ended by the test")
        if kind == "interrupt" and place == "forward" and context == contexts[0]:
            arguments = os.getpid(), signal.SIGINT
            threading.Timer(seconds, os.kill, arguments).start()
        return None

    return strike


def fail(program, number, kind, states, rng):
    """Lets a step fail, and recovers.

    `states` has the right state before each step, by its number. Returns the number of
    the step that is to be done next.
    """
    strike, reads = saboteur(kind, rng, program.participants), rng.random() < 0.5
    gluon_syncbn.set_timeout(SHORT)
    if kind == "deadlock":
        del program.net.forward  # the plain loop is not allowed any more
    fails(program, number, strike, rng if reads else None)
    if kind == "interrupt":
        with suppress(KeyboardInterrupt):  # if it has not come yet
            time.sleep(0.05)
        # In the first line of a scope's __exit__ it leaves what the scope has set.
        autograd.set_recording(False)
        autograd.set_training(False)
    gluon_syncbn.recover()
    gluon_syncbn.set_timeout(LONG)
    if kind == "deadlock":
        gluon_syncbn.allow_plain_loop(program.net)
    step = whole_step(program, number, kind, states)
    program.set_statistics(states[step][1])
    return step


def fails(program, number, strike, reads=None):
    """Whether the step has failed; afterwards a program may read something first."""
    try:
        program.run(number, strike)
        program.finish()
    except (mx.MXNetError, UsersMistake, KeyboardInterrupt):
        if reads:
            program.try_to_read(reads)
        return True
    return False


def whole_step(program, number, kind, states):
    """The number of the next step; an error unless this one was whole or undone."""
    state = program.state()
    steps = [n for n in (number, number + 1) if states[n][0] == state]
    assert steps, f"{program.setting}, {kind} in step {number}: a mixture"
    return steps[0]


def fail_for_good(seed, kinds):
    """One rank's part of a program of several, of which one step fails on all of them.

    Some may have had their update, as the failure reaches a rank before its step is
    whole and another after it; so all have to start again.
    """
    rng = random.Random(seed)
    choices = ["ranks"], list(MODES), list(OPTIMIZERS), STORES
    setting = tuple(rng.choice(values) for values in choices)
    states, program = normal_states(setting), Program(*setting)
    last, kind = rng.randrange(STEPS), rng.choice(kinds)
    strike = saboteur(kind, rng, program.participants)
    for number in range(last + 1):
        if number == last:
            gluon_syncbn.set_timeout(SHORT)
        # The other rank's failure may reach this one in the step before.
        if fails(program, number, strike if number == last else None, rng):
            failures.end_waits("given up by the test")
            break
    with suppress(mx.MXNetError):
        meeting.total("a test's barrier", timeout=LONG)
        return  # nothing has failed on any rank
    with pytest.raises(mx.MXNetError, match="start the program again, from its check"):
        gluon_syncbn.recover()
    step = whole_step(program, number, kind, states)
    with pytest.raises(mx.MXNetError, match="of an earlier error"):
        meeting.total("a test's barrier", timeout=LONG)
    with pytest.raises((mx.MXNetError, UsersMistake)):
        program.run(number)
    failures.give_up("for the queued part of that step")
    assert program.state() == states[step][0]


def undone_kinds(seeds, way, kinds):
    """The kinds of failures that undid a step of each seed's random program.

    Two of its steps fail once; it has to come to the same end as without.
    """
    expected, undone = {}, set()
    for seed in seeds:
        rng = random.Random(seed)
        choices = [way], list(MODES), list(OPTIMIZERS), STORES
        setting = tuple(rng.choice(values) for values in choices)
        if setting not in expected:
            expected[setting] = normal_states(setting)
        states, program = expected[setting], Program(*setting)
        number, failing = 0, rng.sample(range(STEPS), 2)
        while number < STEPS:
            if number not in failing:
                program.run(number)
                number += 1
                continue
            failing.remove(number)
            kind = rng.choice(kinds)
            begin = fail(program, number, kind, states, rng)
            if begin <= number:
                undone.add(kind)
            number = begin
        assert_ends(program, states[-1])
    return undone


def assert_ends(program, expected):
    """The program's state and statistics are those of a run without a failure."""
    state, statistics = program.state(), program.statistics()
    assert state == expected[0], f"{program.setting}: another end"
    for name, arrays in statistics.items():
        np.testing.assert_array_equal(arrays, expected[1][name], name)


def normal_states(setting):
    """States and statistics before each step, and after the last."""
    program = Program(*setting)
    states = [(program.state(), program.statistics())]
    for number in range(STEPS):
        program.run(number)
        states.append((program.state(), program.statistics()))
    return states
