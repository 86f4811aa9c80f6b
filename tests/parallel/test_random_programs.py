"""Random programs of the layer agree with the oracle: 100 that are always the same.

Before each step the oracle is given the program's own parameters, statistics and
gradients, so that each step is compared independently. hypothesis reduces a program
that fails, and prints it. GLUON_SYNCBN_PROGRAMS=10000 runs 10000 programs, which
differ each time.
"""

import os
from functools import partial

import gluon_syncbn
from gluon_syncbn.compat import IS_GLUON_2

import mxnet as mx
import pytest
from hypothesis import HealthCheck, given, settings
from mxnet import autograd
from support.nd import nd
from support.program_oracle import OLD, Checks, Net
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
        self._net, norms = make_net(program)
        self._devices = gluon_syncbn.Devices(norms[0].contexts())
        self._checks = Checks(program, norms)

    def run(self, step, data):
        """Run a step, and compare its results."""
        checks = self._checks
        states, gradients = checks.states(), checks.gradients()
        training = step.kind.startswith("train")
        recording = step.kind in ("train", "predict_recorded")
        xs = self._put(data.x)
        if recording and self._program.x_grad_req != "null":
            for x in xs:
                x.attach_grad(self._program.x_grad_req)
                x.grad[:] = OLD
        flags = autograd.record if recording else autograd.pause
        with flags(train_mode=training):
            ys = self._devices.map(self._net, xs)
        assert {type(y) for shard in ys for y in shard} == {type(xs[0])}
        if recording:
            dys = list(zip(*map(self._put, data.dys)))
            for left in reversed(range(step.backwards)):
                options = {"train_mode": training, "retain_graph": left > 0}
                backward = partial(autograd.backward, **options)
                self._devices.map(backward, ys, dys)
        mx.nd.waitall()
        net = Net(self._program, states, data.join(data.x), training)
        checks.check_outputs(zip(*ys), data, net)
        checks.check_statistics(net)
        if recording:
            checks.check_gradients(xs, step, data, net, gradients)

    def _put(self, shards):
        """Return arrays, one on each context, of the kind that the program has."""
        contexts = self._devices.contexts
        arrays = [nd.array(x, c, x.dtype) for x, c in zip(shards, contexts)]
        return [x.as_np_ndarray() for x in arrays] if mx.util.is_np_array() else arrays


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
