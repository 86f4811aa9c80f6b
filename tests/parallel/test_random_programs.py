"""Random programs agree with the oracle: 100 that are always the same.

Before each step the oracle is given the program's own parameters, statistics and
gradients, so that each step is compared independently. hypothesis reduces a program
that fails, and prints it. GLUON_SYNCBN_PROGRAMS=10000 runs 10000 programs, which
differ each time.
"""

import os

import gluon_syncbn
from gluon_syncbn.compat import IS_GLUON_2

import mxnet as mx
import pytest
from hypothesis import HealthCheck, given, settings
from mxnet import autograd
from support.nd import nd
from support.program_oracle import OLD, Checks
from support.programs import Data, make_net, programs

MORE = int(os.environ.get("GLUON_SYNCBN_PROGRAMS", 0))


def run(program):
    """Run a program; raise AssertionError where a result is not the oracle's."""
    empty = any(0 in step.rows for step in program.steps)
    is_np = program.numpy or IS_GLUON_2
    # 0 would be an unknown size.
    with mx.util.np_shape(empty or is_np), mx.util.np_array(is_np):
        runner = Runner(program)
        for number, step in enumerate(program.steps):
            try:
                runner.run(step, Data(program, number, step))
            except AssertionError as error:
                raise AssertionError(f"step {number}: {error}") from error


class Runner:
    """A program's net and devices."""

    def __init__(self, program):
        self._program = program
        self._net, self._norms = make_net(program)
        if program.way == "parallel":
            self.devices = self._net.devices
        else:
            self.devices = gluon_syncbn.Devices(self._norms[0].contexts())
        self._contexts = self.devices.contexts
        self._checks = Checks(program, self._norms)

    def run(self, step, data):
        """Run a step, and compare its results."""
        checks = self._checks
        states, gradients = checks.states(), checks.gradients()
        training = step.kind.startswith("train")
        recording = step.kind in ("train", "predict_recorded")
        x = self._inputs(data, recording)
        flags = autograd.record if recording else autograd.pause
        with flags(train_mode=training):
            ys = self._forward(x)
        if recording:
            for left in reversed(range(step.backwards)):
                options = {"train_mode": training, "retain_graph": left > 0}
                self._backward(ys, data, **options)
        mx.nd.waitall()
        ys = [
            checks.by_context([y[number] for y in ys], data)
            for number in range(len(data.dys))
        ]
        net = checks.expected(states, data, training)
        checks.check_outputs(ys, data, net)
        checks.check_statistics(net)
        if recording:
            checks.check_input_gradients(x, step, data, net)
            checks.check_gradients(step, data, net, gradients)

    def _inputs(self, data, recording):
        """Return the net's argument on each context, or the whole batch."""
        xs, contexts = data.x, self._contexts
        if self._program.way == "parallel":
            xs, contexts = [data.join(xs)], contexts[:1]
        arrays = [_array(x, context) for x, context in zip(xs, contexts)]
        grad_req = self._program.x_grad_req
        for array in arrays:
            if recording and grad_req != "null":
                array.attach_grad(grad_req)
                array.grad[:] = OLD
        return arrays

    def _forward(self, xs):
        """Return a list of outputs for each element of xs."""

        def call(x):
            outputs = self._net(x)
            outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
            assert {type(y) for y in outputs} == {type(x)}
            return outputs

        if self._program.way == "devices":
            return self.devices.map(call, xs)
        return [call(x) for x in xs]

    def _backward(self, ys, data, **options):
        if self._program.way == "parallel":
            dys = [_array(data.join(dy), self._contexts[0]) for dy in data.dys]
            autograd.backward(ys[0], dys, **options)
            return
        pairs = [
            (y, [_array(dy[k], self._contexts[k]) for dy in data.dys])
            for k, y in enumerate(ys)
        ]
        if self._program.way == "plain_loop":
            # Each context may have its own backward if inputs have no gradients.
            is_each = self._program.x_grad_req == "null"
            for part in [[pair] for pair in pairs] if is_each else [pairs]:
                heads, dys = (sum(column, []) for column in zip(*part))
                autograd.backward(heads, dys, **options)
            return
        self.devices.map(lambda pair: autograd.backward(*pair, **options), pairs)


def _array(x, context):
    array = nd.array(x, context, x.dtype)
    return array.as_np_ndarray() if mx.util.is_np_array() else array


@pytest.mark.timeout(MORE + 300)
@settings(
    max_examples=MORE or 100,
    derandomize=not MORE,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(programs())
def test_equals_the_oracle(program):
    try:
        run(program)
    except Exception:
        gluon_syncbn.recover()
        raise
