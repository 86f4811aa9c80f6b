"""Random nets of SyncBatchNorm layers are trained and agree with a float64 oracle.

The oracle gets the net's own values before each step, so each step is compared by
itself. GLUON_SYNCBN_PROGRAMS=10000 runs 10000 programs, which differ each time.
"""

import os
from functools import partial

import gluon_syncbn
from gluon_syncbn.compat import IS_GLUON_2

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given, settings
from mxnet import autograd
from support import program_oracle as oracle
from support.helpers import cpus, put, split_rows
from support.programs import SETTINGS, make_data, make_net, programs

OLD = 0.5  # the inputs' gradients before a step, to which grad_req="add" adds
MORE = int(os.environ.get("GLUON_SYNCBN_PROGRAMS", 0))


def run(program):
    """Run a program; raise AssertionError where a result is not the oracle's."""
    empty = any(0 in step.rows for step in program.steps)
    is_np = program.numpy or IS_GLUON_2
    # MXNet takes a size of 0 for unknown unless np_shape is set.
    with mx.util.np_shape(empty or is_np), mx.util.np_array(is_np):
        runner = Runner(program)
        for number, step in enumerate(program.steps):
            print("step", number)  # pytest shows it after a failure
            runner.run(step, *make_data(program, number, step))


class Runner:
    """A program's net and devices."""

    def __init__(self, program):
        self._program, self._state_dtype = program, oracle.state_dtype(program.dtype)
        self._net, self._norms = make_net(program)
        self._devices = gluon_syncbn.Devices(cpus(program.contexts))

    def run(self, step, batch, *gradients):
        """Run a step, and compare its results."""
        states, former = self._states(), self._gradients()
        training = step.kind.startswith("train")
        recording = step.kind in ("train", "predict_recorded")
        xs = self._put(batch, step)
        if recording and self._program.x_grad_req != "null":
            for x in xs:
                x.attach_grad(self._program.x_grad_req)
                x.grad[:] = OLD
        flags = autograd.record if recording else autograd.pause
        with flags(train_mode=training):
            ys = self._devices.map(self._net, xs)
        assert {type(y) for shard in ys for y in shard} == {type(xs[0])}
        if recording:
            dys = list(zip(*(self._put(dy, step) for dy in gradients)))
            for left in reversed(range(step.backwards)):
                options = {"train_mode": training, "retain_graph": left > 0}
                backward = partial(autograd.backward, **options)
                self._devices.map(backward, ys, dys)
        mx.nd.waitall()
        net = oracle.Net(self._program, states, batch, training)
        for number, (shards, expected) in enumerate(zip(zip(*ys), net.outputs)):
            self._check_whole(f"output {number}", shards, expected)
        for number, (state, expected) in enumerate(zip(self._states(), net.states)):
            for name in oracle.STATISTICS:
                where = f"{name} of layer {number}"
                oracle.check(where, state[name].value, expected[name], "float64")
        if recording:
            self._check_gradients(xs, step, *net.backward(gradients), former)

    def _put(self, whole, step):
        """Return each context's shard, an array of mx.np if the program uses mx.np."""
        shards = split_rows(whole, step.rows, self._program.batch_axis)
        arrays = put(shards, self._devices.contexts, whole.dtype)
        return [x.as_np_ndarray() for x in arrays] if mx.util.is_np_array() else arrays

    def _states(self):
        """Return the state of each layer, which has to be equal on all contexts."""
        names = (*oracle.PARAMETERS, *oracle.STATISTICS)
        return [
            {n: self._state(getattr(norm, n)) for n in names} for norm in self._norms
        ]

    def _state(self, parameter):
        first, *others = (array.asnumpy() for array in parameter.list_data())
        assert first.dtype == self._state_dtype
        for other in others:
            np.testing.assert_array_equal(other, first, parameter.name)
        return oracle.exact(first)

    def _gradients(self):
        """Return the gradient on each context, by the layer's number and by name."""
        return {
            (number, name): [a.asnumpy() for a in getattr(norm, name).list_grad()]
            for number, norm in enumerate(self._norms)
            for name in oracle.PARAMETERS
            if getattr(norm, name).grad_req != "null"
        }

    def _check_whole(self, name, shards, expected):
        shards = [shard.asnumpy() for shard in shards]
        whole = np.concatenate(shards, self._program.batch_axis)
        oracle.check(name, whole, expected, self._program.dtype)

    def _check_gradients(self, xs, step, dx, terms_of_calls, former):
        """Compare gradients; `former` are the parameters' gradients before the step."""
        grad_req = self._program.x_grad_req
        if grad_req == "add":
            terms = [oracle.exact(OLD), *[dx] * step.backwards]
            dx = oracle.total(terms, self._program.dtype)
        if grad_req != "null":
            self._check_whole("input gradient", [x.grad for x in xs], dx)
        for (number, name), results in self._gradients().items():
            calls = terms_of_calls[number][oracle.PARAMETERS.index(name)]
            sums = [oracle.sums(self._program, terms, step.rows) for terms in calls]
            is_added = getattr(self._norms[number], name).grad_req == "add"
            for k, (result, *parts) in enumerate(zip(results, *sums)):
                if is_added:
                    old = oracle.exact(former[number, name][k])
                    parts = [old, *parts * step.backwards]
                where = f"d{name} of layer {number} on cpu({k})"
                expected = oracle.total(parts, self._state_dtype)
                oracle.check(where, result, expected, self._state_dtype)


@pytest.mark.timeout(MORE + 300)
@settings(SETTINGS, max_examples=MORE or 100, derandomize=not MORE)
@given(programs())
def test_equals_the_oracle(program):
    try:
        run(program)
    except Exception:
        gluon_syncbn.recover()
        raise
