"""Compares the arrays of a random program with the oracle.

It must not know how the net was called.
"""

import numpy as np

from support import reference
from support.program_oracle import Net, Value, exact, kind_of, stored, total

LEARNING_RATE = 0.125
OLD = 0.5  # in the inputs' gradients before a step; only "add" keeps it
STATISTICS = "running_mean", "running_var"
PARAMETERS = "gamma", "beta"


def check(name, result, expected, dtype):
    """Raises AssertionError unless `result` has the dtype and is near a Value."""
    assert result.dtype == dtype, f"{name} is {result.dtype}, expected {dtype}"
    shape = expected.value.shape
    assert result.shape == shape, f"{name} has shape {result.shape}, expected {shape}"
    wrong = ~(abs(result - expected.value) <= expected.error)  # also for a NaN
    assert not wrong.any(), (
        f"{name}: {wrong.sum()} of {wrong.size} are wrong, such as "
        f"{result[wrong][0]!r}, expected {expected.value[wrong][0]!r} to "
        f"{expected.error[wrong][0]:.2g}"
    )


class Checks:
    """The arrays of a program's layers on each context, beside the right ones."""

    def __init__(self, program, norms):
        self._program, self._norms = program, norms
        self._kind = kind_of(program.dtype)

    def _arrays(self, number, name, kind="data"):
        """Per context the data or "grad"."""
        parameter = getattr(self._norms[number], name)
        return [array.asnumpy() for array in getattr(parameter, f"list_{kind}")()]

    def states(self):
        """The state of each layer, equal on all contexts."""
        return [self._state(number) for number in range(len(self._norms))]

    def _state(self, number):
        state = {}
        for name in (*PARAMETERS, *STATISTICS):
            first, *others = self._arrays(number, name)
            for other in others:
                np.testing.assert_array_equal(other, first, name)
            state[name] = exact(first)
        return state

    def expected(self, states, data, train, ys):
        """What the oracle computes; `ys` has the outputs per context."""
        ys = list(map(data.join, ys))
        return Net(self._program, states, data.join(data.x), ys, train)

    def by_context(self, arrays, data):
        """Results per context, also where they are whole."""
        if self._program.way == "parallel":
            return data.split(arrays[0].asnumpy())
        return [array.asnumpy() for array in arrays]

    def check_outputs(self, ys, data, net):
        for number, (y, expected) in enumerate(zip(ys, net.outputs)):
            check(f"output {number}", data.join(y), expected, self._program.dtype)

    def check_statistics(self, net):
        for number, (result, right) in enumerate(zip(self.states(), net.states)):
            for kind in STATISTICS:
                array = result[kind].value.astype(self._kind)
                check(f"{kind} of layer {number}", array, right[kind], self._kind)

    # ---- gradients -------------------------------------------------------------------

    def check_input_gradients(self, xs, step, data, net):
        request, dtype = self._program.x_request, self._program.dtype
        if request == "null":
            return
        results = self.by_context([x.grad for x in xs], data)
        dx, _ = net.backward(list(map(data.join, data.dys)))
        if request == "add":
            dx = total([exact(OLD), *[dx] * step.backwards], dtype)
        check("input gradient", data.join(results), dx, dtype)

    def gradients(self):
        """{(number of a layer, name, context): gradient} of all that have one."""
        return {
            (number, name, k): gradient
            for number, layer in enumerate(self._program.layers)
            for name in layer.requests()
            for k, gradient in enumerate(self._arrays(number, name, "grad"))
        }

    def check_gradients(self, step, data, net, former):
        """Compares each context's own with those before, `former`, and the oracle's."""
        fresh = {}
        _, elements = net.backward(list(map(data.join, data.dys)))
        for number, columns in enumerate(elements):
            for name, uses in zip(PARAMETERS, columns):
                sums = [self._sums(use, data) for use in uses]
                parts = [total(terms, self._kind) for terms in zip(*sums)]
                for k, part in zip(data.active, parts):
                    fresh[number, name, k] = part
                if self._program.way == "parallel":  # each device has the sum
                    for k in range(self._program.contexts):
                        fresh[number, name, k] = total(parts, self._kind)
        for key, result in self.gradients().items():
            number, name, k = key
            request = self._program.layers[number].requests()[name]
            expected = exact(former[key])
            if request == "add" and key in fresh:
                terms = [expected, *[fresh[key]] * step.backwards]
                expected = total(terms, self._kind)
            elif key in fresh:
                expected = fresh[key]
            where = f"d{name} of layer {number} on cpu({k})"
            check(where, result, expected, self._kind)

    def _sums(self, elements, data):
        """Per active context the sums over its rows."""
        axes, _ = reference.reduction_axes(elements.value, self._program.axis)
        bounds = np.cumsum([data.rows[k] for k in data.active])[:-1]
        shards = [np.split(v, bounds, self._program.batch_axis) for v in elements]
        for value, error in zip(*shards):
            yield stored(Value(value.sum(axes), error.sum(axes)), self._kind)

    def check_parameters(self, before, trained):
        """A trainer has taken a step with the gradients, unless not `trained`."""
        gradients = self.gradients() if trained else {}
        for number in range(len(self._norms)):
            for name in PARAMETERS:
                terms = [before[number][name]]
                for key, gradient in gradients.items():
                    is_part = self._program.way != "parallel" or key[2] == 0
                    if key[:2] == (number, name) and is_part:
                        terms.append(exact(-LEARNING_RATE * gradient))
                new = total(terms, self._kind) if len(terms) > 1 else terms[0]
                result = self._arrays(number, name)[0]
                check(f"{name} of layer {number}", result, new, self._kind)
