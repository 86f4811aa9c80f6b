"""The float64 oracle of a random program's net, with a bound of every right result.

Called by program_runner.py. A net is a few chains of layers over one whole batch, and
every layer's output is an output of the net: the next layer is compared for the input
that it was given. NumPy only.
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
    """One call of a layer with the whole batch of devices that normalize together.

    Parameters
    ----------
    program : program.Program
    layer : program.Layer
    state : dict
        gamma and beta as arrays, running_mean and running_var as Values, and batches,
        the number of training batches; all before this call.
    x : Value
        Its error is that of an output of another layer which nobody could read.
    train : bool

    Attributes
    ----------
    y : Value
    state : dict
        After the call.
    """

    def __init__(self, program, layer, state, x, train):
        self._program, self._layer, self.state = program, layer, dict(state)
        self._dtype, self._x = program.dtype, x.value
        self._axes, self._shape = reference._reduced(x.value, program.axis)
        self._gamma = state["gamma"] if layer.scale else np.ones_like(state["gamma"])
        self._count = x.value.size // x.value.shape[program.axis]
        self._conditioning, self._where = 0.0, (program.axis, layer.epsilon)
        self.synchronized = train and not layer.use_global_stats
        identity = np.ones_like(self._gamma), np.zeros_like(self._gamma)
        if self.synchronized:
            results = reference.forward(self._x, *identity, *self._where)
            self._x_hat, mean, var, self._inv_std = results
            self._conditioning = reference.conditioning(self._x, *self._where)
            self._update_running(mean, var, x.error.max(self._axes, initial=0.0))
        else:
            running = state["running_mean"].value, state["running_var"].value
            self._constant = (*running, *self._where)
            self._inv_std = 1 / np.sqrt(running[1] + layer.epsilon)
            arguments = self._x, *identity, *self._constant
            self._x_hat = reference.inference_forward(*arguments)
        self._largest = abs(self._x_hat).max(self._axes, initial=1.0)
        self._activate(state["beta"])

    def _over(self, channels):
        return np.reshape(channels, self._shape)

    def _tolerance(self, scale, dtype=None):
        """The largest error of a result before it is stored."""
        limits = self._count, self._conditioning, scale
        return reference.tolerance(dtype or self._dtype, *limits)[1]

    def _update_running(self, mean, var, x_error):
        layer, state, count = self._layer, self.state, self._count
        state["batches"] += 1
        old = 1 - 1 / state["batches"] if layer.momentum is None else layer.momentum
        factor = count / (count - 1) if layer.unbiased and count > 1 else 1
        std, kind = np.sqrt(var), kind_of(self._dtype)
        x_error = x_error + unit_roundoff("float64") * abs(mean)  # means of devices
        var_error = 2 * factor * x_error * (std + x_error)
        for name, batch, size, error in (
            ("running_mean", mean, abs(mean) + std, x_error),
            ("running_var", factor * var, factor * var, var_error),
        ):
            former = state[name]
            new = reference.update_running(former.value, batch, old)
            own = self._tolerance(abs(former.value) + size, kind)
            error = own + old * former.error + (1 - old) * error
            state[name] = stored(Value(new, error), kind)

    def _activate(self, beta):
        layer, slope = self._layer, self._layer.slope or 0.0
        self._z = self._x_hat * self._over(self._gamma) + self._over(beta)
        scale = abs(self._gamma) * self._largest + abs(beta)
        self._z_error = self._over(self._tolerance(scale))
        y = reference.activate(self._z, layer.activation, slope)
        self.y = stored(Value(y, self._z_error * max(1.0, slope)), self._dtype)

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
        if self.synchronized:
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
        error = error + np.where(near, abs(dy.value * (1 - slope)), 0.0)
        if layer.activation == "elu":
            tiny = np.finfo(kind_of(self._dtype)).tiny  # what may be flushed to zero
            error = error + abs(dz) * self._z_error + abs(dy.value) * tiny
        return dz, error


class Net:
    """The chains of a program over one whole batch: every use of every layer.

    Parameters
    ----------
    states : list of dict
        Per layer, as `Use` takes it.
    ys : list of array, optional
        The outputs, which the next layers of their chains were given. Without them
        only states are compared.

    Attributes
    ----------
    outputs : list of Value
    states : list of lists of dict
        Per layer its states: before the call, and after each use that changes it.
    """

    def __init__(self, program, states, x, ys, train):
        self._program, self.states = program, [[state] for state in states]
        self._last = len(program.layers)  # the number of an output's convolution
        self._chains, self.outputs = [], []
        for chain in program.chains:
            y, uses = exact(x), []
            for number in chain:
                state = self.states[number][-1]
                y = self._permuted(y, number)
                use = Use(program, program.layers[number], state, y, train)
                if use.synchronized:
                    self.states[number].append(use.state)
                uses.append((number, use))
                self.outputs.append(self._permuted(use.y, self._last))
                y = use.y
                if ys is not None:
                    y = exact(ys[len(self.outputs) - 1])
                    y = self._permuted(y, self._last, back=True)
            self._chains.append(uses)

    def _permuted(self, y, number, back=False):
        """Through a convolution that moves channels and changes signs, exactly."""
        if not self._program.convolutions:
            return y
        order, signs = channel_moves(y.value.shape[1], number)
        signs = signs[:, None, None]
        if back:
            value, error = np.empty_like(y.value), np.empty_like(y.error)
            value[:, order], error[:, order] = y.value * signs, y.error
            return Value(value, error)
        return Value(y.value[:, order] * signs, y.error[:, order])

    def backward(self, dys):
        """dx, and per layer lists of the elements of dgamma and of dbeta."""
        dxs, gradients = [], [([], []) for _ in self._program.layers]
        dys = [self._permuted(exact(dy), self._last, back=True) for dy in dys]
        for uses in reversed(self._chains):
            dx = None
            for number, use in reversed(uses):
                dy = dys.pop()
                if dx is not None:
                    dy = total([dy, dx], self._program.dtype)
                dx, *elements = use.backward(dy)
                for terms, more in zip(gradients[number], elements):
                    terms.append(more)
                dx = self._permuted(dx, number, back=True)
            dxs.append(dx)
        return total(dxs, self._program.dtype), gradients


def channel_moves(channels, number):
    """The order and the signs of channels behind the convolution of this number."""
    rng = np.random.default_rng(number)
    return rng.permutation(channels), rng.choice([-1.0, 1.0], channels)
