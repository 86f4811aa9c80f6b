"""The float64 oracle of a random program's net, with a bound of every right result.

A net calls a few layers with the batch. `Checks` compares its arrays.
"""

from collections import namedtuple

import numpy as np

from support import reference

OLD = 0.5  # the inputs' gradients before a step; only "add" keeps it
STATISTICS = "running_mean", "running_var"
PARAMETERS = "gamma", "beta"

# An array, and per element how far from it a right result may be.
Value = namedtuple("Value", "value error")


def unit_roundoff(dtype):
    return reference.tolerance(dtype)[0]


def exact(array):
    array = np.asarray(array, np.float64)
    return Value(array, np.zeros_like(array))


def stored(value, dtype):
    """Return a value after rounding to `dtype`."""
    return Value(value.value, value.error + unit_roundoff(dtype) * abs(value.value))


def total(values, dtype):
    """Return the sum; every partial sum may be rounded to `dtype`."""
    terms = sum(abs(v.value) for v in values)
    error = sum(v.error for v in values) + unit_roundoff(dtype) * len(values) * terms
    return Value(sum(v.value for v in values), error)


def kind_of(dtype):
    """Return the dtype of parameters and statistics."""
    return "float64" if dtype == "float64" else "float32"


class Use:
    """One call of a layer with the whole batch.

    `state` has gamma, beta and running statistics as Values; the attribute `state` has
    those after the call, and `y` is the output.
    """

    def __init__(self, program, layer, state, x, train):
        self._layer, self.state = layer, dict(state)
        self._dtype, self._x = program.dtype, x.astype(np.float64)
        self._axes, self._shape = reference.reduction_axes(x, program.axis)
        gamma, beta = state["gamma"].value, state["beta"].value
        ones, zeros = np.ones_like(gamma), np.zeros_like(gamma)
        self._gamma = gamma if layer.scale else ones
        self._count = x.size // x.shape[program.axis]
        self._conditioning, self._where = 0.0, (program.axis, layer.epsilon)
        self._synchronized = train
        if self._synchronized:
            results = reference.forward(self._x, ones, zeros, *self._where)
            self._x_hat, mean, var, self._inv_std = results
            self._conditioning = reference.conditioning(self._x, *self._where)
            self._update_running(mean, var)
        else:
            running = state["running_mean"].value, state["running_var"].value
            self._constant = (*running, *self._where)
            self._inv_std = 1 / np.sqrt(running[1] + layer.epsilon)
            arguments = self._x, ones, zeros, *self._constant
            self._x_hat = reference.inference_forward(*arguments)
        self._largest = abs(self._x_hat).max(self._axes, initial=1.0)
        slope = layer.slope or 0.0
        self._z = self._x_hat * self._over(self._gamma) + self._over(beta)
        scale = abs(self._gamma) * self._largest + abs(beta)
        self._z_error = self._over(self._tolerance(scale))
        y = reference.activate(self._z, layer.activation, slope)
        self.y = stored(Value(y, self._z_error * max(1.0, slope)), self._dtype)

    def _over(self, channels):
        return np.reshape(channels, self._shape)

    def _tolerance(self, scale, dtype=None):
        """The largest error of a result before it is stored."""
        limits = self._count, self._conditioning, scale
        return reference.tolerance(dtype or self._dtype, *limits)[1]

    def _update_running(self, mean, var):
        state, count = self.state, self._count
        old, kind = self._layer.momentum, kind_of(self._dtype)
        factor = 1
        if self._layer.unbiased_running_var and count > 1:
            factor = count / (count - 1)
        std = np.sqrt(var)
        mean_error = unit_roundoff("float64") * abs(mean)  # each device has one
        var_error = 2 * factor * mean_error * (std + mean_error)
        for name, batch, size, error in (
            ("running_mean", mean, abs(mean) + std, mean_error),
            ("running_var", factor * var, factor * var, var_error),
        ):
            former = state[name]
            new = reference.update_running(former.value, batch, old)
            own = self._tolerance(abs(former.value) + size, kind)
            error = own + old * former.error + (1 - old) * error
            state[name] = stored(Value(new, error), kind)

    def backward(self, dy):
        """dx, and the elements whose sums are dgamma and dbeta, as Values."""
        dz, dz_error = self._through_activation(dy)
        dz_size = abs(dz) + dz_error  # dz may be 0 and x_hat too, of one row
        gamma_inv_std = self._over(abs(self._gamma) * self._inv_std)
        terms = dz_size * (1 + self._over(self._largest))
        lost = reference.reconstruction_error(
            self._dtype, self._layer.activation, self._largest.max()
        )
        of_dy = dz_error
        if self._synchronized:
            dx, _, _ = reference.backward(self._x, dz, self._gamma, *self._where)
            size = self._over(self._largest) * abs(self._x_hat)
            of_dy = of_dy + (dz_error * (1 + size)).mean(self._axes, keepdims=True)
        else:
            arguments = self._x, dz, self._gamma, *self._constant
            dx, _, _ = reference.inference_backward(*arguments)
        scale = gamma_inv_std * terms.max(self._axes, keepdims=True, initial=0.0)
        error = self._tolerance(scale) + 2 * lost * scale + gamma_inv_std * of_dy
        own = self._tolerance(1.0) * terms + lost * terms
        return (
            stored(Value(dx, error), self._dtype),
            Value(dz * self._x_hat, own + dz_error * abs(self._x_hat)),
            Value(dz, own + dz_error),
        )

    def _through_activation(self, dy):
        layer, slope = self._layer, self._layer.slope or 0.0
        dy = np.asarray(dy, np.float64)
        dz = dy * reference.activation_gradient(self._z, layer.activation, slope)
        if layer.activation in (None, "identity"):
            return dz, np.zeros_like(dz)
        # The error decides on which side of the kink z is.
        near = abs(self._z) <= self._z_error
        return dz, np.where(near, abs(dy * (1 - slope)), 0.0)


class Net:
    """The layers of a program that are called with one whole batch.

    The attribute `states` has the state of each layer after the call, and `outputs` are
    Values.
    """

    def __init__(self, program, states, x, train):
        self._dtype, self.states, self._uses = program.dtype, list(states), []
        for number in program.uses:
            state = self.states[number]
            use = Use(program, program.layers[number], state, x, train)
            self.states[number] = use.state
            self._uses.append((number, use))
        self.outputs = [use.y for _, use in self._uses]

    def backward(self, dys):
        """dx, and per layer lists of the elements of dgamma and of dbeta."""
        dxs, gradients = [], [([], []) for _ in self.states]
        for (number, use), dy in zip(self._uses, dys):
            dx, *elements = use.backward(dy)
            for terms, more in zip(gradients[number], elements):
                terms.append(more)
            dxs.append(dx)
        return total(dxs, self._dtype), gradients


# ---- Comparison.


def check(name, result, expected, dtype):
    """Raise AssertionError unless `result` has the dtype and is near a Value."""
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

    def states(self):
        """Return the state of each layer, which has to be equal on all contexts."""
        return [
            {n: self._state(getattr(norm, n)) for n in (*PARAMETERS, *STATISTICS)}
            for norm in self._norms
        ]

    def _state(self, parameter):
        first, *others = (array.asnumpy() for array in parameter.list_data())
        assert first.dtype == self._kind
        for other in others:
            np.testing.assert_array_equal(other, first, parameter.name)
        return exact(first)

    def gradients(self):
        """Return the gradient on each context, by the layer's number and by name."""
        return {
            (number, name): [a.asnumpy() for a in getattr(norm, name).list_grad()]
            for number, norm in enumerate(self._norms)
            for name in PARAMETERS
            if getattr(norm, name).grad_req != "null"
        }

    def check_outputs(self, ys, data, net):
        for number, (shards, expected) in enumerate(zip(ys, net.outputs)):
            y = data.join([y.asnumpy() for y in shards])
            check(f"output {number}", y, expected, self._program.dtype)

    def check_statistics(self, net):
        for number, (result, right) in enumerate(zip(self.states(), net.states)):
            for kind in STATISTICS:
                name = f"{kind} of layer {number}"
                check(name, result[kind].value, right[kind], "float64")

    def check_gradients(self, xs, step, data, net, former):
        """Compare gradients; `former` are those of parameters before the step."""
        grad_req, dtype = self._program.x_grad_req, self._program.dtype
        dx, elements = net.backward(list(map(data.join, data.dys)))
        if grad_req == "add":
            dx = total([exact(OLD), *[dx] * step.backwards], dtype)
        if grad_req != "null":
            result = data.join([x.grad.asnumpy() for x in xs])
            check("input gradient", result, dx, dtype)
        bounds = np.cumsum(data.rows)[:-1]
        for (number, name), results in self.gradients().items():
            uses = elements[number][PARAMETERS.index(name)]
            sums = [self._sums(use, bounds) for use in uses]
            is_added = getattr(self._norms[number], name).grad_req == "add"
            for k, (result, *parts) in enumerate(zip(results, *sums)):
                if is_added:
                    old = exact(former[number, name][k])
                    parts = [old, *parts * step.backwards]
                where = f"d{name} of layer {number} on cpu({k})"
                check(where, result, total(parts, self._kind), self._kind)

    def _sums(self, elements, bounds):
        """Yield the sums over the rows of each context."""
        axes, _ = reference.reduction_axes(elements.value, self._program.axis)
        shards = [np.split(v, bounds, self._program.batch_axis) for v in elements]
        for value, error in zip(*shards):
            yield stored(Value(value.sum(axes), error.sum(axes)), self._kind)
