"""The float64 oracle of random training programs (tests/support/programs.py)."""

from collections import namedtuple

from gluon_syncbn.reference import reduction_axes

import numpy as np

from support import reference
from support.helpers import split_rows

STATISTICS = "running_mean", "running_var"
PARAMETERS = "gamma", "beta"

# An expected array, and the largest error that a result may have in each element.
Value = namedtuple("Value", "value error")


def unit_roundoff(dtype):
    return reference.tolerance(dtype)[0]


def exact(array):
    array = np.asarray(array, np.float64)
    return Value(array, np.zeros_like(array))


def stored(value, dtype):
    """Add the error of rounding to `dtype`. The value itself is not rounded."""
    return Value(value.value, value.error + unit_roundoff(dtype) * abs(value.value))


def total(values, dtype):
    """Return the sum, whose error includes rounding partial sums to `dtype`."""
    terms = sum(abs(v.value) for v in values)
    error = sum(v.error for v in values) + unit_roundoff(dtype) * len(values) * terms
    return Value(sum(v.value for v in values), error)


def state_dtype(dtype):
    """Return the dtype of parameters and statistics."""
    return "float64" if dtype == "float64" else "float32"


class Use:
    """One call of a layer: its output `y`, and its new `state` as Values."""

    def __init__(self, program, options, state, x, trains):
        self._options, self._dtype, self._trains = options, program.dtype, trains
        self.state, self._x = dict(state), x.astype(np.float64)
        self._axis_epsilon = program.axis, options.epsilon
        self._axes, self._shape = reduction_axes(x, program.axis)
        self._count, self._conditioning = x.size // x.shape[program.axis], 0.0
        gamma, beta = (state[name].value for name in PARAMETERS)
        ones, zeros = np.ones_like(gamma), np.zeros_like(gamma)
        self._gamma = gamma if options.scale else ones
        if trains:
            results = reference.forward(self._x, ones, zeros, *self._axis_epsilon)
            self._x_hat, mean, var, self._inv_std = results
            self._conditioning = abs(mean * self._inv_std).max()
            self._update_running(mean, var)
        else:
            mean, var = (state[name].value for name in STATISTICS)
            self._inv_std = 1 / np.sqrt(var + options.epsilon)
            self._x_hat = (self._x - self._over(mean)) * self._over(self._inv_std)
        self._largest = abs(self._x_hat).max(self._axes, initial=1.0)
        self._slope = options.slope or 0.0
        self._z = self._x_hat * self._over(self._gamma) + self._over(beta)
        scale = abs(self._gamma) * self._largest + abs(beta)
        self._z_error = self._over(self._tolerance(scale))
        y = reference.activate(self._z, options.activation, self._slope)
        self.y = stored(Value(y, self._z_error), self._dtype)

    def _over(self, channels):
        return np.reshape(channels, self._shape)

    def _tolerance(self, scale, dtype=None):
        limits = self._count, self._conditioning, scale
        return reference.tolerance(dtype or self._dtype, *limits)[1]

    def _update_running(self, mean, var):
        momentum, dtype, factor = self._options.momentum, state_dtype(self._dtype), 1
        if self._options.unbiased_running_var and self._count > 1:
            factor = self._count / (self._count - 1)
        std = np.sqrt(var)
        mean_error = unit_roundoff("float64") * abs(mean)  # shards' means are rounded
        var_error = 2 * factor * mean_error * (std + mean_error)
        for name, batch, size, error in (
            ("running_mean", mean, abs(mean) + std, mean_error),
            ("running_var", factor * var, factor * var, var_error),
        ):
            old = self.state[name]
            new = momentum * old.value + (1 - momentum) * batch
            rounding = self._tolerance(abs(old.value) + size, dtype)
            error = rounding + momentum * old.error + (1 - momentum) * error
            self.state[name] = stored(Value(new, error), dtype)

    def backward(self, dy):
        """Return Values of dx, and of the terms whose sums are dgamma and dbeta."""
        dz, dz_error = self._through_activation(dy)
        dz_size = abs(dz) + dz_error  # the largest |dz| that a device may compute
        gamma_inv_std = self._over(self._gamma * self._inv_std)
        sizes = dz_size * (1 + self._over(self._largest))
        x_hat_error = reference.reconstruction_error(
            self._dtype, self._options.activation, self._largest.max()
        )
        from_dz = dz_error
        if self._trains:
            dx, _, _ = reference.backward(self._x, dz, self._gamma, *self._axis_epsilon)
            size = self._over(self._largest) * abs(self._x_hat)
            from_dz = from_dz + (dz_error * (1 + size)).mean(self._axes, keepdims=True)
        else:
            dx = dz * gamma_inv_std
        scale = abs(gamma_inv_std) * sizes.max(self._axes, keepdims=True, initial=0.0)
        error = self._tolerance(scale) + 2 * x_hat_error * scale
        error = error + abs(gamma_inv_std) * from_dz
        rounding = self._tolerance(1.0) * sizes + x_hat_error * sizes
        return (
            stored(Value(dx, error), self._dtype),
            Value(dz * self._x_hat, rounding + dz_error * abs(self._x_hat)),
            Value(dz, rounding + dz_error),
        )

    def _through_activation(self, dy):
        dy = np.asarray(dy, np.float64)
        if self._options.activation in (None, "identity"):
            return dy, np.zeros_like(dy)
        # Near the kink a rounding error decides which slope z gets. At the kink it gets
        # the slope of the negative side, as in MXNet.
        near = abs(self._z) <= self._z_error
        error = np.where(near, abs(dy * (1 - self._slope)), 0.0)
        return dy * np.where(self._z > 0, 1.0, self._slope), error


class Net:
    """A call of a program's net: its `outputs`, and the new `states` of its layers."""

    def __init__(self, program, states, x, trains):
        self._dtype, self.states, self._uses = program.dtype, list(states), []
        for number in program.uses:
            options = program.layers[number].options
            use = Use(program, options, self.states[number], x, trains)
            self.states[number] = use.state
            self._uses.append((number, use))
        self.outputs = [use.y for _, use in self._uses]

    def backward(self, dys):
        """Return dx, and for each layer lists of the terms of dgamma and of dbeta."""
        dxs, terms = [], [([], []) for _ in self.states]
        for (number, use), dy in zip(self._uses, dys):
            dx, *found = use.backward(dy)
            for uses, more in zip(terms[number], found):
                uses.append(more)
            dxs.append(dx)
        return total(dxs, self._dtype), terms


def sums(program, batch, row_counts):
    """Divide the rows of a Value among contexts, and yield each context's sum."""
    axes, _ = reduction_axes(batch.value, program.axis)
    shards = [split_rows(part, row_counts, program.batch_axis) for part in batch]
    dtype = state_dtype(program.dtype)
    for value, error in zip(*shards):
        yield stored(Value(value.sum(axes), error.sum(axes)), dtype)


def check(name, result, expected, dtype):
    """Raise AssertionError unless `result` has the dtype and is near a Value."""
    assert result.dtype == dtype, f"{name} is {result.dtype}, expected {dtype}"
    shape = expected.value.shape
    assert result.shape == shape, f"{name} has shape {result.shape}, expected {shape}"
    wrong = ~(abs(result - expected.value) <= expected.error)  # a NaN is wrong
    assert not wrong.any(), (
        f"{name}: {wrong.sum()} of {wrong.size} are wrong, such as "
        f"{result[wrong][0]!r}, expected {expected.value[wrong][0]!r} +- "
        f"{expected.error[wrong][0]:.2g}"
    )
