"""The layer on several devices of one process, a thread each, against the whole batch.

Called by tests/gpu with the driver of a GPU, or of a CPU, see native.py. No MXNet
takes part.
"""

import dataclasses
import threading
import uuid

import numpy as np

from support import reference
from support.native import NONE, Activation, Layer

WRITE, ADD = 1, 2
EPS, MOMENTUM = 1e-5, 0.9
# Gammas of the first channels, of which all but one cannot be divided by.
AWKWARD = -0.5, 0, 1e-6, -1e-42


@dataclasses.dataclass(frozen=True)
class Case:
    """A whole batch, the layer's settings, and the rows of each device."""

    dtype: str
    shape: tuple
    rows: list
    axis: int = 1
    request: int = WRITE
    center: float = 0.5
    activation: Activation = NONE

    @property
    def parameter_dtype(self):
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def channels(self):
        return self.shape[self.axis]

    @property
    def steps(self):
        """Gradients that are added to are known after one step."""
        return 1 if self.request == ADD else 2


class Batch:
    """Random data of a case: as a device stores it, and the same values in float64."""

    def __init__(self, case):
        rng = np.random.default_rng()
        self.gamma, self.beta = rng.normal(1, 0.3, (2, case.channels))
        self.gamma = np.maximum(self.gamma, 0.3)
        count = min(len(AWKWARD), max(case.channels - 1, 0))
        self.gamma[:count] = AWKWARD[:count]
        kind = case.parameter_dtype
        self.gamma, self.beta = self.gamma.astype(kind), self.beta.astype(kind)
        self.x = rng.normal(case.center, 2, case.shape).astype(case.dtype)
        self.x64 = self.x.astype(np.float64)
        z = reference.forward(self.x64, *self.parameters64(), case.axis, EPS)[0]
        dy = rng.normal(size=case.shape)
        function, slope, _ = case.activation
        if function != "identity":
            # Rounding may decide on which side of the kink it is.
            dy[np.abs(z) <= 1e-4 * np.abs(z).max()] = 0
        self.dy = dy.astype(case.dtype)
        dy64 = self.dy.astype(np.float64)
        self.dz64 = dy64 * reference.activation_gradient(z, function, slope)

    def parameters64(self):
        return self.gamma.astype(float), self.beta.astype(float)


class Device(threading.Thread):
    """One device's shard: training steps in a thread of its own."""

    def __init__(self, driver, layer, case, batch, rows):
        super().__init__(daemon=True)
        self._layer, self._case = layer, case
        x, dy = batch.x[rows], batch.dy[rows]
        self._step = case.dtype, x.shape
        ones = np.ones(case.channels)
        adds = case.request == ADD
        old = np.full(x.shape, 0.5, case.dtype) if adds else None
        data = {"x": x, "dy": dy, "y": None, "dx": old}
        vectors = {
            "gamma": batch.gamma,
            "beta": batch.beta,
            "running_mean": 0 * ones,
            "running_var": ones,
            "dgamma": ones if adds else None,
            "dbeta": ones if adds else None,
        }
        kind = case.parameter_dtype
        self.memory = {
            **{name: driver.array(x.shape, case.dtype, v) for name, v in data.items()},
            **{name: driver.array(ones.shape, kind, v) for name, v in vectors.items()},
        }
        self.error = None

    def run(self):
        requests = {
            f"{n}_request": self._case.request for n in ("dx", "dgamma", "dbeta")
        }
        try:
            for _ in range(self._case.steps):
                arguments = {**self.memory, **requests, "y_request": WRITE}
                self._layer.forward(True, *self._step, **arguments)
                self._layer.backward(*self._step, **arguments)
        except RuntimeError as error:
            self.error = error
        finally:
            self._layer.close()

    def results(self):
        if self.error is not None:
            raise self.error
        return {name: array.get() for name, array in self.memory.items()}


def train(driver, case, batch):
    """Trains on all devices at once; returns what each has written."""
    group, count = uuid.uuid4().hex, len(case.rows)
    settings = case.axis, EPS, MOMENTUM
    ends = np.cumsum(case.rows)
    devices = []
    for k, (rows, end) in enumerate(zip(case.rows, ends)):
        place = f"gpu({k})", driver.device, count
        layer = Layer(group, *place, *settings, activation=case.activation)
        devices.append(Device(driver, layer, case, batch, slice(end - rows, end)))
    for device in devices:
        device.start()
    for device in devices:
        device.join()
    return [device.results() for device in devices]


def oracle(x, dz, gamma, beta, axis):
    """z, mean, var, dx, dgamma, dbeta of the whole batch, for a gradient of z."""
    z, mean, var, _ = reference.forward(x, gamma, beta, axis, EPS)
    return z, mean, var, *reference.backward(x, dz, gamma, axis, EPS)


class Right:
    """The right results of a batch, and comparisons with them."""

    def __init__(self, driver, case, batch, whole_batch):
        self._case = case
        gamma, beta = batch.parameters64()
        results = whole_batch(batch.x64, batch.dz64, gamma, beta, case.axis)
        z, self._mean, self._var, self._dx, self._dgamma, self._dbeta = results
        function, slope, from_output = case.activation
        self._y = reference.activate(z, function, slope)
        # The sizes of terms, from which tolerances follow.
        ndim = len(case.shape)
        of_channels = [-1 if i == case.axis else 1 for i in range(ndim)]
        mean, inv_std = self._mean, 1 / np.sqrt(self._var + EPS)
        x_hat = (batch.x64 - mean.reshape(of_channels)) * inv_std.reshape(of_channels)
        x_hat = np.abs(x_hat).max()
        y_terms = np.abs(gamma).max() * x_hat + np.abs(beta).max()
        self._y_terms = 2 * max(slope, 1) * y_terms
        dz = np.abs(batch.dz64)
        self._dx_terms = np.abs(gamma * inv_std).max() * dz.max() * (1 + x_hat)
        others = tuple(i for i in range(ndim) if i != case.axis)
        self._sum_terms = dz.sum(others).max() * (1 + x_hat) + 1
        of_x_hat = reference.reconstruction_error(case.dtype, function, x_hat)
        self._of_x_hat = from_output * of_x_hat
        count = batch.x64.size // case.channels
        self._lane = min(driver.lane, count)
        self._limits = count, np.max(np.abs(mean) * inv_std)

    def _near(self, result, right, scale, stored, error=0):
        limits = *self._limits, scale, self._lane
        rtol, atol = reference.tolerance(stored, *limits)
        if self._lane > 0:
            atol = max(atol, reference.tolerance(self._case.dtype, *limits)[1])
        np.testing.assert_allclose(result, right, rtol, atol + error)

    def check_data(self, y, dx):
        dtype, terms = self._case.dtype, self._dx_terms
        old = 0.5 if self._case.request == ADD else 0.0
        self._near(y, self._y, self._y_terms, dtype)
        error = 2 * self._of_x_hat * terms
        self._near(dx, old + self._dx, terms + old, dtype, error)

    def check_parameter_gradients(self, dgamma, dbeta):
        """Of all devices together: each writes its own sums, a trainer adds them up."""
        added = len(self._case.rows) if self._case.request == ADD else 0
        for total, right in (dgamma, self._dgamma), (dbeta, self._dbeta):
            limits = self._sum_terms, self._case.parameter_dtype
            error = self._of_x_hat * self._sum_terms
            self._near(total, right + added, *limits, error)

    def check_running(self, running_mean, running_var):
        mean, var = np.zeros_like(self._mean), np.ones_like(self._var)
        for _ in range(self._case.steps):
            mean = reference.update_running(mean, self._mean, MOMENTUM)
            var = reference.update_running(var, self._var, MOMENTUM)
        limits = (
            np.abs(self._mean).max() + self._var.max() + 1,
            self._case.parameter_dtype,
        )
        self._near(running_mean, mean, *limits)
        self._near(running_var, var, *limits)


def check_devices(driver, case, whole_batch=oracle):
    """Trains a random batch on the devices of a case; compares all that they write."""
    assert sum(case.rows) == case.shape[0]
    batch = Batch(case)
    results = train(driver, case, batch)
    right = Right(driver, case, batch, whole_batch)

    def whole(name):
        return np.concatenate([r[name].astype(np.float64) for r in results])

    right.check_data(whole("y"), whole("dx"))
    totals = (
        sum(r[name].astype(float) for r in results) for name in ("dgamma", "dbeta")
    )
    right.check_parameter_gradients(*totals)
    running = [(r["running_mean"], r["running_var"]) for r in results]
    for values in running:
        right.check_running(*values)
        np.testing.assert_array_equal(values, running[0])
