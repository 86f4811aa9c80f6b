"""The float64 oracle of a random program's net, with a bound of every right result.

A net is a few chains of layers over one whole batch, and every layer's output is an
output of the net: the next layer is compared for the input that it was given. NumPy
only.
"""

from collections import namedtuple

import numpy as np

from support import reference

# An array, and per element how far from it a right result may be.
Value = namedtuple("Value", "value error")


def unit_roundoff(dtype):
    return reference.tolerance(dtype)[0]


def exact(array):
    array = np.asarray(array, np.float64)
    return Value(array, np.zeros_like(array))


def stored(value, dtype):
    """A value that was rounded to `dtype`."""
    return Value(value.value, value.error + unit_roundoff(dtype) * abs(value.value))


def total(values, dtype):
    """The sum, of which every partial sum may be rounded to `dtype`."""
    terms = sum(abs(v.value) for v in values)
    error = sum(v.error for v in values) + unit_roundoff(dtype) * len(values) * terms
    return Value(sum(v.value for v in values), error)


def kind_of(dtype):
    """The dtype of parameters and statistics."""
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
        mean_error = unit_roundoff("float64") * abs(mean)  # of each device's
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
        """dx, and the elements whose sums are dgamma and dbeta, for a Value dy."""
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
        slopes = reference.activation_gradient(self._z, layer.activation, slope)
        dz = dy.value * slopes
        error = abs(slopes) * dy.error
        if layer.activation in (None, "identity"):
            return dz, error
        # On the other side of the kink, where the error decides on which one z is.
        near = abs(self._z) <= self._z_error
        return dz, error + np.where(near, abs(dy.value * (1 - slope)), 0.0)


class Net:
    """The chains of a program over one whole batch: every use of every layer.

    `ys` are the arrays that the next layers of their chains were given. The attribute
    `states` has the state of each layer after the call, and `outputs` are Values.
    """

    def __init__(self, program, states, x, ys, train):
        self._dtype, self.states = program.dtype, list(states)
        self._chains, self.outputs = [], []
        for chain in program.chains:
            y, uses = x, []
            for number in chain:
                layer, state = program.layers[number], self.states[number]
                use = Use(program, layer, state, y, train)
                self.states[number] = use.state
                uses.append((number, use))
                y = ys[len(self.outputs)]
                self.outputs.append(use.y)
            self._chains.append(uses)

    def backward(self, dys):
        """dx, and per layer lists of the elements of dgamma and of dbeta."""
        dxs, gradients = [], [([], []) for _ in self.states]
        dys = [exact(dy) for dy in dys]
        for uses in reversed(self._chains):
            above = []
            for number, use in reversed(uses):
                dy = total([dys.pop(), *above], self._dtype) if above else dys.pop()
                dx, *elements = use.backward(dy)
                for terms, more in zip(gradients[number], elements):
                    terms.append(more)
                above = [dx]
            dxs += above
        return total(dxs, self._dtype), gradients
