"""A training program of random settings, whose whole state can be compared.

`Program.queue` lets a test strike at some places of a step; ``failed_steps.py`` does.
"""

from __future__ import annotations

from contextlib import suppress

import gluon_syncbn
from gluon_syncbn import distributed
from gluon_syncbn.common.mxnet_version import IS_GLUON_2
from gluon_syncbn.common.nested import arrays_in

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from support.blocks import Function, name_scope
from support.helpers import MODES, Loop, set_mode
from support.nd import nd

OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3},
    "adam": {"learning_rate": 0.01},
    "adagrad": {"learning_rate": 0.01},  # it writes its states before the weights
    "decoupleddecay": {"learning_rate": 0.1},
}
STORES = ("device", None), ("device", False), ("local", True)
STEPS, ROWS = 4, 6


class Net(Function):
    """Branches between norms, one of which is used twice."""

    def __init__(self):
        super().__init__("net_")  # parameters keep their order by name
        with name_scope(self):
            self.first, self.left, self.right = (
                nn.HybridSequential() for _ in range(3)
            )
            for part, momentum in (self.first, 0.9), (self.left, 0.5), (self.right, 0):
                norm = gluon_syncbn.SyncBatchNorm(momentum=momentum)
                part.add(nn.Conv2D(4, 3, padding=1), norm)
            self.twice, self.last = gluon_syncbn.SyncBatchNorm(), nn.Dense(3)

    def compute(self, F, x):
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
        net = Net()
        self.driver = Loop(self.contexts)
        if way == "make_parallel":
            gluon_syncbn.make_parallel(net, ctx=self.contexts)
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
                net(nd.ones((2, 3, 4, 4), ctx=context)).wait_to_read()
        set_mode(net, mode)
        rng = np.random.RandomState(0)
        for _, p in sorted(net.collect_params().items()):
            p.set_data(nd.array(rng.uniform(0.1, 0.5, p.shape)))
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
        return nd.array(x), nd.array(y)

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
        return 0 * weight

    def update(self, index, weight, grad, state):
        if IS_GLUON_2:  # lists of one
            (index,), (weight,), (grad,), (state,) = index, weight, grad, state
        self._update_count(index)
        state *= 0.9
        state += 0.1 * self.rescale_grad * grad
        weight *= 0.99
        weight -= self.lr * state


def random_setting(rng, way):
    """The arguments of a Program."""
    choices = [way], list(MODES), list(OPTIMIZERS), STORES
    return tuple(rng.choice(values) for values in choices)


def normal_states(setting):
    """States and statistics before each step, and after the last."""
    program = Program(*setting)
    states = [(program.state(), program.statistics())]
    for number in range(STEPS):
        program.run(number)
        states.append((program.state(), program.statistics()))
    return states
