"""The life of nets: a method for each thing that programs do with them."""

import copy
from tempfile import NamedTemporaryFile

import gluon_syncbn
from gluon_syncbn import (
    convert_sync_batchnorm,
    freeze_statistics,
    make_parallel,
    recompute_statistics,
    revert_parallel,
    revert_sync_batchnorm,
)
from gluon_syncbn.layer.finding import unsynchronized_layers

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from support.blocks import move
from support.helpers import MODES, set_mode
from support.nets import (
    CALLS,
    Body,
    Branches,
    Ramp,
    StatisticsInForward,
    array,
    dense,
    started,
)

X = [[1.0, 2], [3, 5], [-1, 2], [0, 1], [4, -2], [2, 2], [-2, 1]]
# A large epsilon keeps the norm from amplifying rounding errors.
NORM = {"in_channels": 2, "momentum": 0.75, "epsilon": 0.5}


LOSSES = (
    *("sum", "list", "one by one", "each row", "given gradients"),
    *("penalty", "penalty first"),
)
GRADIENTS = (
    *("kept as is", "grad", "list_grad", "attribute", "clip", "zero_grad"),
    *("of each context", "other current context"),
)
WRITES = (
    *("data", "of each context", "list_data", "other current context"),
    *("set_data", "kept arrays", "load"),
)
STEPS = "trainer", "trainer", "reduced before", "own optimizer", "none"


class Life:
    """Nets and their trainer; on one device, without our package, if no contexts."""

    def __init__(self, contexts):
        self.is_one, self.contexts = contexts is None, contexts or [mx.cpu(0)]
        self.net = started(Body(self._norm()), contexts)
        self.other = started(Branches(), contexts, seed=2)
        self.is_parallel, self.mode = not self.is_one, "imperative"
        self.kept, self.states, self.is_frozen = [], None, False
        self.renew_trainer("sgd")

    def _norm(self):
        return (StatisticsInForward if self.is_one else nn.BatchNorm)(**NORM)

    def nets(self):
        return self.net, self.other

    def parameters(self):
        return [p for net in self.nets() for p in net.collect_params().values()]

    def learned(self):
        fixed = "mean", "var", "shift"
        return [p for p in self.parameters() if not p.name.endswith(fixed)]

    def trained(self):
        return [p for p in self.learned() if p.grad_req != "null"]

    def updates_in_backward(self):
        """Return True if layers are MXNet's own, with statistics of their own order."""
        return bool(unsynchronized_layers(self.net)) and not self.is_parallel

    # ---- Calls.

    def train(self, call, loss, rows, inputs, gradients, step, has_two_scopes, **flags):
        trains = flags["trains"]
        x = array(X[:rows])
        if inputs:
            x.attach_grad(inputs)
            x.grad[:] = 0.25
        found = [self.net(x)] if flags["looks"] else []
        self.net.scale[:], outputs = 1 + rows / 8, []
        for factor in (1, 0.5)[: 1 + has_two_scopes]:
            with autograd.record(train_mode=trains):
                first = self.parameters() if loss == "penalty first" else []
                penalty = sum((p.data() ** 2).sum() for p in first)
                outputs += CALLS[call](self.net, self.other, x * factor)
                heads, head_gradients = self._heads(outputs, loss)
                heads += [penalty] if first else []
                for head in reversed(heads) if loss == "one by one" else ():
                    head.backward(retain_graph=True, train_mode=trains)
        if loss != "one by one":
            autograd.backward(heads, head_gradients, train_mode=trains)
        if step == "reduced before":
            self.trainer.allreduce_grads()
        self._change_gradients(gradients)
        if step == "reduced before":
            self.trainer.update(1, ignore_stale_grad=True)
        elif step == "trainer":
            self.trainer.step(1, ignore_stale_grad=True)
        elif step == "own optimizer":
            for p in self.trained():
                p.data()[:] -= 2**-7 * p.grad()
        found += [*outputs, *heads]
        return found + [x.grad] if inputs else found

    def _heads(self, outputs, loss):
        if loss == "given gradients":
            return outputs, [y.detach() + 1 for y in outputs]
        losses = [(y**2).sum() for y in outputs]
        if loss == "each row":
            losses = [(y[k] ** 2).sum() for y in outputs for k in range(len(y))]
        if loss == "penalty":
            losses += [(p.data() ** 2).sum() for p in self.trained()]
        return [sum(losses[1:], losses[0])] if loss == "sum" else losses, None

    def _change_gradients(self, road):
        gradients = [p.grad() for p in self.trained()]
        if road == "list_grad":
            gradients = [p.list_grad()[0] for p in self.trained()]
        elif road == "attribute":
            gradients = [p.data().grad for p in self.trained()]
        elif road == "of each context":
            gradients = [p.grad(c) for p in self.trained() for c in self.contexts]
        elif road == "other current context":
            with mx.cpu(1):
                gradients = [p.grad() for p in self.trained()]
        elif road == "zero_grad":
            for net in self.nets():
                net.collect_params().zero_grad()
        if road == "clip":
            norm = sum((g**2).sum().asscalar() for g in gradients) ** 0.5
            for g in gradients:
                g *= 0.5 / (1 + norm)
        elif road not in ("kept as is", "zero_grad"):
            for g in gradients:
                g[:] = g * 0.5

    def predict(self, rows, count):
        return [self.net(self.other(array(X[k : k + rows]))) for k in range(count)]

    def may_map(self):
        """Return True if gradients of a map are as if the net had got the batch."""
        has_sums = any(p.grad_req == "add" for p in self.learned())
        return self.is_parallel and not has_sums and not unsynchronized_layers(self.net)

    def map(self, trains):
        """Pass each device its rows in `Devices.map`, and update if `trains`."""

        def call(x):
            with autograd.record() if trains else autograd.pause():
                y = self.net(x)
                loss = (y**2).sum()
            if trains:
                loss.backward()
            return y

        shards, run = [array(X)], map
        if not self.is_one:
            shards, run = self.net.devices.split(*shards), self.net.devices.map
        ys = [y.asnumpy() for y in run(call, shards)]
        if trains:
            self.trainer.step(1, ignore_stale_grad=True)
        return [array(np.concatenate(ys))]

    def adapt(self, rows):
        """Call the net in training mode without recording, and then predict."""
        with autograd.train_mode():
            found = [self.net(array(X[:rows]))]
        return [*found, self.net(array(X))]

    def read(self):
        """Return what a program sees of each array on the last context."""
        last, parameters = self.contexts[-1], self.parameters()
        found = [p.data(last) for p in parameters]
        found += [array for p in parameters for array in p.list_data()[-1:]]
        for k, p in enumerate(self.trained()):
            if not getattr(p, "is_summed", False):  # a device may have its own gradient
                found.append(p.list_grad()[0])
            else:
                found.append(p.grad(last) if k % 2 else p.list_grad()[-1])
        return found

    def fail(self):
        """Let a device fail while others wait for it, and recover."""
        self.net.failing = self.contexts[-1]
        failed = False
        try:
            with autograd.record():
                self.net(array(X))
        except ArithmeticError:
            failed = True
        self.net.failing = None
        if not self.is_one:
            gluon_syncbn.recover()
        assert failed

    # ---- Changes of parameters.

    def keep(self):
        self.kept = [p.data() for p in self.learned()]

    def write(self, road, looks):
        """Change the learned parameters; return what the last context has then."""
        if road == "kept arrays":
            self._scale(self.kept)
        elif road == "set_data":
            for p in self.learned():
                p.set_data(p.data() * 0.75 + 0.125)
        elif road == "load":
            with NamedTemporaryFile() as file:
                self.net.save_parameters(file.name)
                self._scale([p.data() for p in self.learned()])
                self.net.load_parameters(file.name)
        elif road == "list_data":
            self._scale([p.list_data()[0] for p in self.learned()])
        elif road == "of each context":
            self._scale([p.data(c) for p in self.learned() for c in self.contexts])
        else:
            current = mx.cpu(1) if road == "other current context" else mx.cpu(0)
            with current:
                self._scale([p.data() for p in self.learned()])
        return [p.data(self.contexts[-1]) for p in self.learned() if looks]

    def _scale(self, arrays):
        for data in arrays:
            data[:] = data * 0.75 + 0.125

    def initialize(self):
        for net in self.nets():
            net.initialize(Ramp(), force_reinit=True)
        self.kept = []

    def reset_ctx(self):
        for net in self.nets():
            net.collect_params().reset_ctx(self.contexts)
        self.kept = []

    def set_grad_req(self, number, grad_req):
        """Set grad_req of a parameter; the first one always has a gradient."""
        learned = self.learned()
        parameter = learned[number % len(learned)]
        # MXNet 1.6 does not add the gradients of its own BatchNorm.
        is_norm = parameter.name.endswith(("gamma", "beta"))
        refused = "null" if parameter is learned[0] else "add" if is_norm else ""
        if grad_req != refused:
            parameter.grad_req = grad_req

    def accumulate(self, grad_req):
        for parameter in self.trained():
            if len(parameter.shape) == 2:
                parameter.grad_req = grad_req

    # ---- Trainers.

    def renew_trainer(self, optimizer, **options):
        settings = {"learning_rate": 2**-7, "momentum": 0.5}
        parameters = self.parameters()  # MXNet would sort a dict by names
        self.trainer = gluon.Trainer(parameters, optimizer, settings, **options)
        self.optimizer = optimizer

    def set_learning_rate(self, rate):
        self.trainer.set_learning_rate(rate)

    def save_states(self):
        with NamedTemporaryFile() as file:
            self.trainer.save_states(file.name)
            self.states = self.optimizer, file.read()

    def load_states(self):
        optimizer, states = self.states
        if optimizer != self.optimizer:  # MXNet cannot load states of other optimizers
            self.renew_trainer(optimizer)
        with NamedTemporaryFile() as file:
            file.write(states)
            file.flush()
            self.trainer.load_states(file.name)

    # ---- Changes of nets.

    def hybridize(self, mode):
        if not self.is_one:
            self.mode = mode
            self.net.hybridize(active=False)
            if MODES[mode] is not None:
                set_mode(self.net, mode)

    def move_to_one(self, **options):
        self.move([mx.cpu(0)], is_parallel=False, **options)

    def move(self, contexts, keeps_states, is_parallel=True, reverts_norms=False):
        """Move to `contexts`, parallel or not, and make a new trainer."""
        if keeps_states:
            self.save_states()
        self.kept = []
        if not self.is_one:
            for net in self.nets() if self.is_parallel else ():
                revert_parallel(net)
            self.contexts, self.is_parallel = contexts, is_parallel
            if reverts_norms:
                revert_sync_batchnorm(self.net)
        for net in self.nets():
            if self.is_parallel:
                make_parallel(net, contexts, reset_ctx=True)
            else:
                move(net, self.contexts)
        if not self.is_one and not is_parallel:
            # MXNet's own faults: static_shape with other arrays, statistics too late.
            is_right = self.mode != "static_shape" and not self.updates_in_backward()
            self.hybridize(self.mode if is_right else "imperative")
        self.renew_trainer(self.optimizer)
        if keeps_states:
            self.load_states()

    def make_parallel_again(self):
        """Predict with a reverted net on the last device between two make_parallel."""
        x = array(X).as_in_context(self.contexts[-1])
        if self.is_one:
            return [self.other(x)]
        for net in self.nets():
            revert_parallel(net)
        y = self.other(x)
        for net in self.nets():
            make_parallel(net, self.contexts)
        return [y]

    def convert(self):
        self._unless_one(convert_sync_batchnorm)

    def revert_norms(self):
        self._unless_one(revert_sync_batchnorm)

    def _unless_one(self, change):
        if not self.is_one:
            change(self.net)

    def _norms(self):
        return [x for x in self.net.layers if isinstance(x, StatisticsInForward)]

    def freeze(self, frozen):
        self.is_frozen = frozen
        if not self.is_one:
            freeze_statistics(self.net, frozen)
        for norm in self._norms():
            norm._kwargs["use_global_stats"] = frozen

    def recompute(self, sizes):
        batches = [array(X[:rows]) * (1 + k) for k, rows in enumerate(sizes)]
        if not self.is_one:
            return recompute_statistics(self.net, batches)
        for norm in self._norms():
            norm.collected = []
        for x in batches:
            self.net(x)
        for norm in self._norms():
            if norm.collected:
                norm.write((0, 0), 1, mx.nd.concat(*norm.collected, dim=0))
            norm.collected = None

    def add_layer(self, is_norm, trains):
        """Add a layer, whose parameters belong to the net from the next call on."""
        layer = self._norm() if is_norm else dense()
        layer.cast("float64")
        layer.initialize(Ramp(), ctx=self.contexts)
        self.net.layers.add(layer)
        self.states = None
        self.renew_trainer("sgd")
        return self.adapt(len(X)) if trains else self.predict(len(X), 1)

    def copy(self, goes_on):
        """Predict with a deep copy, and continue with the copy if `goes_on`."""
        twin, x = copy.deepcopy(self.net), array(X)
        if goes_on:
            self.net, twin = twin, self.net
            self.kept = []
            move(self.net, self.contexts)  # Gluon's copies have no gradients
            self.renew_trainer("sgd")
        return [twin(x), self.net(x)]
