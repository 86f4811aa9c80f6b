"""Compares the arrays of a random program with the oracle.

Called by program_runner.py between steps. It must not know how the net was called.
"""

import numpy as np

from support.program_oracle import (
    Net,
    Value,
    exact,
    kind_of,
    stored,
    total,
    unit_roundoff,
)

LEARNING_RATE = 0.125
OLD = 0.5  # in the inputs' gradients before a step; only "add" keeps it
STATISTICS = "running_mean", "running_var"
PARAMETERS = "gamma", "beta"


def is_near(result, expected):
    """Tells of each element whether it is in the bounds of a Value."""
    return abs(result - expected.value) <= expected.error  # never, for a NaN


def check(name, result, expected, dtype):
    """Raises AssertionError unless `result` has the dtype and is near a Value."""
    assert result.dtype == dtype, f"{name} is {result.dtype}, expected {dtype}"
    shape = expected.value.shape
    assert result.shape == shape, f"{name} has shape {result.shape}, expected {shape}"
    wrong = ~is_near(result, expected)
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
        self._initial = {
            name: np.full(
                program.shape[program.axis],
                1.0 if name in ("gamma", "running_var") else 0.0,
                self._kind,
            )
            for name in (*PARAMETERS, *STATISTICS)
        }

    def _arrays(self, norm, name):
        """Per context; a parameter without a shape has its initial values."""
        parameter = getattr(norm, name)
        if parameter._data is None:
            return [self._initial[name]] * self._program.contexts
        return [array.asnumpy() for array in parameter.list_data()]

    def states(self):
        """Per group of contexts the state of each layer, equal on all of them."""
        return [
            [self._state(norm, group, part) for norm in self._norms]
            for group, part in enumerate(self._program.groups)
        ]

    def _state(self, norm, group, part):
        state = {"batches": norm._sync.rendezvous.batches()[group]}
        everyone = range(self._program.contexts)
        for name in (*PARAMETERS, *STATISTICS):
            arrays = self._arrays(norm, name)
            first = arrays[part[0]]
            for k in everyone if name in PARAMETERS else part:
                np.testing.assert_array_equal(arrays[k], first, name)
            state[name] = exact(first)
        return {**state, **{name: state[name].value for name in PARAMETERS}}

    def expected(self, states, data, train, ys=None):
        """What the oracle computes, per group of contexts of which some take part.

        `ys` has the outputs per context, where they could be read.
        """
        return {
            group: Net(
                self._program,
                states[group],
                data.join(data.x, part),
                ys and [data.join(y, part) for y in ys],
                train,
            )
            for group, part in enumerate(self._program.groups)
            if set(part) & set(data.active)
        }

    def by_context(self, arrays, data):
        """Results per context, also where they are whole."""
        if self._program.way == "parallel":
            return data.split(arrays[0].asnumpy())
        return [None if array is None else array.asnumpy() for array in arrays]

    def check_outputs(self, ys, data, nets):
        for group, net in nets.items():
            part = self._program.groups[group]
            for number, (y, expected) in enumerate(zip(ys, net.outputs)):
                name = f"output {number} of contexts {part}"
                check(name, data.join(y, part), expected, self._program.dtype)

    def check_statistics(self, nets):
        """Compares the statistics of groups that took part."""
        after = self.states()
        for group, net in nets.items():
            for number, uses in enumerate(net.states):
                expected, result = uses[-1], after[group][number]
                name = f"of layer {number}, group {group}"
                for statistic in STATISTICS:
                    array = result[statistic].value.astype(self._kind)
                    there = f"{statistic} {name}"
                    check(there, array, expected[statistic], self._kind)
                batches = expected["batches"]
                assert result["batches"] == batches, f"number of batches {name}"

    def check_same_statistics(self, states):
        """Bit by bit, and the number of batches."""
        for group, (layers, expected) in enumerate(zip(self.states(), states)):
            for number, (layer, right) in enumerate(zip(layers, expected)):
                for name in STATISTICS:
                    there = f"{name} of layer {number}, group {group}"
                    result, value = layer[name].value, right[name].value
                    np.testing.assert_array_equal(result, value, there)
                assert layer["batches"] == right["batches"], f"batches, group {group}"

    def check_failed(self, nets):
        """Each statistic is the old one, or that of a call that was completed."""
        for group, net in nets.items():
            for number, norm in enumerate(self._norms):
                for name in STATISTICS:
                    arrays = self._arrays(norm, name)
                    for k in self._program.groups[group]:
                        assert any(
                            is_near(arrays[k], state[name]).all()
                            for state in net.states[number]
                        ), f"{name} of layer {number} on cpu({k}) is that of no call"

    # ---- gradients -------------------------------------------------------------------

    def check_input_gradients(self, xs, step, data, nets):
        request = self._program.x_request
        if request == "null":
            return
        grads = [None if x is None else x.grad for x in xs]
        results = self.by_context(grads, data)
        for group, net in nets.items():
            part = self._program.groups[group]
            dx, _ = net.backward([data.join(dy, part) for dy in data.dys])
            if request == "add":
                dtype = self._program.dtype
                dx = total([exact(OLD), *[dx] * step.backwards], dtype)
            name = f"input gradient of contexts {part}"
            check(name, data.join(results, part), dx, self._program.dtype)

    def _wanted(self):
        """(layer's number, name, request) of all that have gradients."""
        for number, layer in enumerate(self._program.layers):
            if layer.scale and layer.gamma_request != "null":
                yield number, "gamma", layer.gamma_request
            if layer.center and layer.beta_request != "null":
                yield number, "beta", layer.beta_request

    def gradients(self):
        """Per layer, name and context the gradient."""
        results = {}
        for number, name, _ in self._wanted():
            parameter = getattr(self._norms[number], name)
            for k in range(self._program.contexts):
                results[number, name, k] = np.zeros_like(self._initial[name])
                if parameter._data is not None:
                    results[number, name, k] = parameter.list_grad()[k].asnumpy()
        return results

    def zero_gradients(self):
        for number, name, _ in self._wanted():
            getattr(self._norms[number], name).zero_grad()

    def check_gradients(self, step, data, nets, former):
        """Compares each context's own; returns what is expected, as `gradients`."""
        expected = {key: exact(gradient) for key, gradient in former.items()}
        fresh = {}
        for group, net in nets.items():
            part = [k for k in self._program.groups[group] if k in data.active]
            _, elements = net.backward([data.join(dy, part) for dy in data.dys])
            for number, columns in enumerate(elements):
                for name, uses in zip(PARAMETERS, columns):
                    sums = [self._sums(use, part, data) for use in uses]
                    for k, terms in zip(part, zip(*sums)):
                        fresh[number, name, k] = total(terms, self._kind)
        for number, name, request in self._wanted():
            for k in range(self._program.contexts):
                key = number, name, k
                if request == "add" and key in fresh:
                    terms = [expected[key], *[fresh[key]] * step.backwards]
                    expected[key] = total(terms, self._kind)
                elif key in fresh:
                    expected[key] = fresh[key]
                elif request == "write" and self._program.way == "parallel":
                    expected[key] = exact(0 * former[key])
        for key, result in self.gradients().items():
            number, name, k = key
            there = f"d{name} of layer {number} on cpu({k})"
            check(there, result, expected[key], self._kind)
        return expected

    def _sums(self, elements, part, data):
        """Per context of `part` the sums over its rows."""
        axes = tuple(
            k
            for k in range(elements.value.ndim)
            if k != self._program.axis % elements.value.ndim
        )
        bounds = np.cumsum([data.rows[k] for k in part])[:-1]
        shards = [np.split(v, bounds, self._program.batch_axis) for v in elements]
        for value, error in zip(*shards):
            yield stored(Value(value.sum(axes), error.sum(axes)), self._kind)

    def check_parameters(self, before, gradients):
        """A trainer has taken a step with these gradients, and none without any."""
        u = unit_roundoff(self._kind)
        for number, norm in enumerate(self._norms):
            for name in PARAMETERS:
                old = before[0][number][name]
                grads = [v for key, v in gradients.items() if key[:2] == (number, name)]
                new, error = old, np.zeros_like(old)
                if grads:
                    change = total(grads, self._kind)
                    new = old - LEARNING_RATE * change.value
                    error = LEARNING_RATE * change.error + 4 * u * (
                        abs(old) + abs(LEARNING_RATE * change.value)
                    )
                result = self._arrays(norm, name)[0]
                there = f"{name} of layer {number}"
                check(there, result, Value(new, error), self._kind)
