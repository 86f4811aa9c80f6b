"""Runs a random program, and compares all that it computes with the oracle.

Called by random_programs.py. Before each step the oracle is given the program's own
parameters, statistics and gradients, so that each step is a comparison of its own.
"""

from contextlib import ExitStack, contextmanager, nullcontext, suppress

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Trainer

import gluon_syncbn
from gluon_syncbn.native import failures
from support.program_checks import LEARNING_RATE, OLD, Checks
from support.program_net import Data, make_net

LONG, SHORT = 60, 0.05  # timeouts in seconds, of steps that succeed and that fail


class Raised(Exception):
    """Raised by a function that is called for a context."""


def run(program):
    """Runs a program; raises AssertionError where a result is not the oracle's."""
    with ExitStack() as stack:
        empty = any(0 in step.rows for step in program.steps)
        stack.enter_context(mx.util.np_shape(empty))  # or else 0 is an unknown size
        stack.callback(gluon_syncbn.set_timeout, gluon_syncbn.get_timeout())
        gluon_syncbn.set_timeout(LONG)
        runner = Runner(program)
        stack.callback(runner.devices.close)
        try:
            for number, step in enumerate(program.steps):
                runner.run(step, Data(program, number, step))
        except BaseException as error:
            gluon_syncbn.recover()  # for the next program
            if isinstance(error, AssertionError):
                raise AssertionError(f"step {number}: {error}") from error
            raise


class Runner:
    """A program's net, devices and trainer."""

    def __init__(self, program):
        self._program = program
        self._net, self._template, self._norms = make_net(program)
        if program.way == "parallel":
            self.devices = self._net.devices
        else:
            self.devices = gluon_syncbn.Devices(self._norms[0].contexts())
        self._contexts = self.devices.contexts
        self._checks = Checks(program, self._norms)
        self._trainer = None
        if program.trainer:
            settings = {"learning_rate": LEARNING_RATE}
            self._trainer = Trainer(self._net.collect_params(), "sgd", settings)
        self._committed = self._checks.states()

    def run(self, step, data):
        """Does a step, and compares."""
        if step.kind == "recover":
            gluon_syncbn.recover()
            self._check_undone()
        elif step.kind in ("missing", "raises"):
            self._fail(step, data)
        else:
            self._succeed(step, data)

    def _succeed(self, step, data):
        """All of a step that succeeds, or forward of one whose backward fails."""
        checks, former = self._checks, self._checks.gradients()
        before = checks.states()
        training = step.kind.startswith(("train", "missing"))
        recording = step.kind not in ("train_unrecorded", "predict")
        x = self._inputs(data, recording)
        flags = autograd.record if recording else autograd.pause
        with flags(train_mode=training), self._participating(data, training):
            ys = self._forward(x)
        if step.kind == "missing_backward":
            mx.nd.waitall()
            with self._failing(step, mx.MXNetError):
                there = [k for k in data.active if k != step.who]
                self._backward(ys, data, there)
                mx.nd.waitall()
        elif recording:
            for left in reversed(range(step.backwards)):
                self._backward(ys, data, data.active, training, left > 0)
        trained = step.kind == "train" and self._trainer is not None
        if trained:
            self._trainer.step(1)
        mx.nd.waitall()
        ys = [
            checks.by_context([None if y is None else y[number] for y in ys], data)
            for number in range(len(data.dys))
        ]
        nets = checks.expected(before, data, training, ys)
        checks.check_outputs(ys, data, nets)
        if step.kind == "missing_backward" and self._trainer is not None:
            self._check_undone()
        else:
            checks.check_statistics(
                {g: [uses[-1] for uses in net.states] for g, net in nets.items()}
            )
        if trained:
            self._committed = checks.states()
        if step.kind == "missing_backward":
            checks.zero_gradients()
        elif recording:
            checks.check_input_gradients(x, step, data, nets)
            checks.check_gradients(step, data, nets, former)
            checks.check_parameters(before, trained)

    # ---- calls -----------------------------------------------------------------------

    def _inputs(self, data, recording):
        """Per context the array that the net is called with, or the whole one."""
        xs, contexts = data.x, self._contexts
        if self._program.way == "parallel":
            xs, contexts = [data.join(xs)], contexts[:1]
        arrays = [_array(x, context) for x, context in zip(xs, contexts)]
        request = self._program.x_request
        for array in arrays:
            if recording and request != "null" and array is not None:
                array.attach_grad(request)
                array.grad[:] = OLD
        return arrays

    def _forward(self, xs, raising=None):
        """Per element of xs the list of outputs."""

        def check(x):
            if x.context == raising:
                raise Raised

        def call(x):
            if x is None:
                return None
            check(x)
            return _as_list(self._net(x))

        if self._program.way == "devices":
            return self.devices.map(call, xs)
        if self._program.way == "plain_loop":
            return [call(x) for x in xs]
        hook = self._template.register_forward_pre_hook(lambda _, xs: check(xs[0]))
        try:
            return [_as_list(self._net(*xs))]
        finally:
            hook.detach()

    def _backward(self, ys, data, there, train_mode=True, retain_graph=False):
        """From the outputs of the contexts `there`, or from the whole ones."""
        options = {"train_mode": train_mode, "retain_graph": retain_graph}
        if self._program.way == "parallel":
            dys = [_array(data.join(dy), self._contexts[0]) for dy in data.dys]
            autograd.backward(ys[0], dys, **options)
            return
        pairs = [None] * len(self._contexts)
        for k in there:
            pairs[k] = ys[k], [_array(dy[k], self._contexts[k]) for dy in data.dys]
        if self._program.way == "plain_loop":
            heads, dys = (sum(column, []) for column in zip(*filter(None, pairs)))
            autograd.backward(heads, dys, **options)
            return

        def backward(pair):
            if pair is not None:
                autograd.backward(*pair, **options)

        self.devices.map(backward, pairs)

    def _participating(self, data, training):
        contexts = [self._contexts[k] for k in data.active]
        everyone = contexts == self._contexts
        if everyone or not training or self._program.way == "parallel":
            return nullcontext()
        return gluon_syncbn.participating(self._template, contexts)

    # ---- failures --------------------------------------------------------------------

    def _fail(self, step, data):
        """A step that fails in forward."""
        before = self._checks.states()
        x, raising = self._inputs(data, True), None
        if step.kind == "raises":
            raising = self._contexts[step.who]
        else:
            x[step.who] = None
        # A plain loop that an error leaves has called devices, which wait for others.
        errors = (Raised, mx.MXNetError) if raising else mx.MXNetError
        with self._failing(step, errors):
            with autograd.record(), self._participating(data, True):
                self._forward(x, raising)
            mx.nd.waitall()
        if self._trainer is None:
            self._checks.check_failed(self._checks.expected(before, data, True))
        self._check_undone()

    def _check_undone(self):
        """A trainer's recovered statistics are those of its latest step."""
        if self._trainer is not None:
            self._checks.check_statistics(self._committed)

    @contextmanager
    def _failing(self, step, errors):
        """The block raises one of these errors, and is recovered from."""
        gluon_syncbn.set_timeout(SHORT)
        try:
            yield
        except errors:
            pass
        else:
            raise AssertionError(f"{step.kind} raised nothing")
        finally:
            gluon_syncbn.set_timeout(LONG)
        if step.by_map and failures.failure():
            with suppress(mx.MXNetError):  # if nobody has read the error
                self.devices.map(int)
        gluon_syncbn.recover()


def _array(x, context):
    return None if x is None else mx.nd.array(x, context, x.dtype)


def _as_list(outputs):
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
