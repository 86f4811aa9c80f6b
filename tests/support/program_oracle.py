"""The float64 oracle of a random program's net, with a bound of every right result.

Called by program_runner.py. A net is a few chains of layers over one whole batch. Each
value carries how far a right result may be from it: the rounding that reference.py
derives, and to first order what the layers before have rounded. NumPy only.
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
    train : bool

    Attributes
    ----------
    y : Value
    state : dict
        After the call.
    """

    def __init__(self, program, layer, state, x, train):
        self._program, self._layer, self.state = program, layer, dict(state)
        self._dtype, axis = program.dtype, program.axis
        self._axes, self._shape = reference._reduced(x.value, axis)
        self._gamma = state["gamma"] if layer.scale else np.ones_like(state["gamma"])
        self._count = x.value.size // x.value.shape[axis]
        self._conditioning = 0.0
        self.synchronized = train and not layer.use_global_stats
        if self.synchronized:
            self._take_moments(x.value)
            self._update_running(x.error.max(self._axes, initial=0.0))
        else:
            self._mean = state["running_mean"].value
            var = state["running_var"].value
            self._inv_std = 1 / np.sqrt(var + layer.epsilon)
        self._x_hat = (x.value - self._over(self._mean)) * self._over(self._inv_std)
        self._largest = abs(self._x_hat).max(self._axes, initial=1.0)
        self._x_hat_error = self._error_of_x_hat(x.error)
        self._activate(state["beta"])

    def _over(self, channels):
        return np.reshape(channels, self._shape)

    def _take_moments(self, x):
        nothing = np.ones_like(self._gamma), np.zeros_like(self._gamma)
        where = self._program.axis, self._layer.epsilon
        _, self._mean, self._var, self._inv_std = reference.forward(x, *nothing, *where)
        self._conditioning = reference.conditioning(x, *where)

    def _block_roundoff(self):
        """MXNet takes float64 through float32 on the negative side."""
        u = unit_roundoff(self._dtype)
        if self._layer.activation in (None, "relu"):
            return u
        return max(u, unit_roundoff("float32"))

    def _tolerance(self, scale, dtype=None):
        """The largest error of a result before it is stored."""
        limits = self._count, self._conditioning, scale
        return reference.tolerance(dtype or self._dtype, *limits)[1]

    def _update_running(self, x_error):
        layer, state, count = self._layer, self.state, self._count
        state["batches"] += 1
        old = 1 - 1 / state["batches"] if layer.momentum is None else layer.momentum
        unbiased = {"unbiased": layer.unbiased, "count": count}
        factor = count / (count - 1) if layer.unbiased and count > 1 else 1
        std, kind = np.sqrt(self._var), kind_of(self._dtype)
        for name, batch, options, size, error in (
            ("running_mean", self._mean, {}, abs(self._mean) + std, x_error),
            (
                "running_var",
                self._var,
                unbiased,
                factor * self._var,
                2 * factor * x_error * (std + x_error),
            ),
        ):
            former = state[name]
            new = reference.update_running(former.value, batch, old, **options)
            own = self._tolerance(abs(former.value) + size, kind)
            error = own + old * former.error + (1 - old) * error
            state[name] = stored(Value(new, error), kind)

    def _error_of_x_hat(self, x_error):
        """To first order; twice of it, for the higher ones, through moments."""
        if not self.synchronized:
            return x_error * self._over(self._inv_std)
        relative = x_error.max(self._axes, initial=0.0) * self._inv_std
        assert (relative * (2 + self._largest) ** 2).max() < 0.1, "an unfit program"
        self._relative = relative
        error = 2 * relative * (2 + self._largest)
        return np.broadcast_to(self._over(error), self._x_hat.shape)

    def _activate(self, beta):
        layer, gamma = self._layer, self._over(self._gamma)
        self._z = self._x_hat * gamma + self._over(beta)
        scale = abs(self._gamma) * self._largest + abs(beta)
        of_x_hat = self._x_hat_error * abs(gamma)
        self._z_error = self._over(self._tolerance(scale)) + of_x_hat
        slope = layer.slope or 0.0
        y = reference.activate(self._z, layer.activation, slope)
        error = self._z_error * max(1.0, slope)
        if self._program.made != "layer":
            # z and y are stored, and an ELU of MXNet's is exp(z) - 1.
            terms = abs(self._z) + abs(y) + slope * (layer.activation == "elu")
            error = error + 4 * self._block_roundoff() * terms
        self.y = stored(Value(y, error), self._dtype)

    def backward(self, dy):
        """dx, and the elements whose sums are dgamma and dbeta, for a Value dy."""
        dz, dz_error = self._through_activation(dy)
        dz_size = abs(dz) + dz_error  # dz may be 0 and x_hat too, of one row
        gamma_inv_std = self._over(abs(self._gamma) * self._inv_std)
        dx = dz
        if self.synchronized:
            projected = (dz * self._x_hat).mean(self._axes, keepdims=True)
            dx = dz - dz.mean(self._axes, keepdims=True) - self._x_hat * projected
        dx = dx * self._over(self._gamma * self._inv_std)
        largest = self._over(self._largest)
        size = dz_size.max(self._axes, keepdims=True, initial=0.0)
        scale = gamma_inv_std * size * (1 + largest)
        lost = reference.reconstruction_error(
            self._dtype, self._layer.activation, self._largest.max()
        )
        error = self._tolerance(scale) + 2 * lost * scale + gamma_inv_std * dz_error
        if self.synchronized:
            of_sums = (dz_error * (1 + largest * abs(self._x_hat))).mean(
                self._axes, keepdims=True
            )
            of_moments = size * self._over(self._relative) * (2 + largest) ** 2
            error = error + gamma_inv_std * (of_sums + 2 * of_moments)
        terms = dz_size * (1 + largest)
        own = self._tolerance(1.0) * terms + lost * terms
        of_x_hat = dz_size * self._x_hat_error + dz_error * abs(self._x_hat)
        return (
            stored(Value(dx, error), self._dtype),
            Value(dz * self._x_hat, own + of_x_hat),
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
        if self._program.made != "layer":
            terms = abs(dy.value) * (1 + slope)
            error = error + 4 * self._block_roundoff() * terms
        return dz, error


class Net:
    """The chains of a program over one whole batch: every use of every layer.

    Attributes
    ----------
    outputs : list of Value
    states : list of lists of dict
        Per layer its states: before the call, and after each use that changes it.
    """

    def __init__(self, program, states, x, train):
        self._program, self.states = program, [[state] for state in states]
        self._chains, self.outputs = [], []
        for chain in program.chains:
            y, uses = exact(x), []
            for number in chain:
                y = self._permuted(y, number)
                state = self.states[number][-1]
                use = Use(program, program.layers[number], state, y, train)
                if use.synchronized:
                    self.states[number].append(use.state)
                uses.append((number, use))
                y = use.y
            self._chains.append(uses)
            self.outputs.append(self._permuted(y, len(program.layers)))

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
        for uses, dy in zip(self._chains, dys):
            d = self._permuted(exact(dy), len(self._program.layers), back=True)
            for number, use in reversed(uses):
                d, *elements = use.backward(d)
                for terms, more in zip(gradients[number], elements):
                    terms.append(more)
                d = self._permuted(d, number, back=True)
            dxs.append(d)
        return total(dxs, self._program.dtype), gradients


def channel_moves(channels, number):
    """The order and the signs of channels behind the convolution of this number."""
    rng = np.random.default_rng(number)
    return rng.permutation(channels), rng.choice([-1.0, 1.0], channels)
