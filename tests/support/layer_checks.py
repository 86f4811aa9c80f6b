"""The layer on several devices of one process, a thread each, against the whole batch.

Called by test_op.py (CPU) and gpu/test_gpu_layer.py, each with its driver, see
native.py. No MXNet takes part.
"""

import threading
import uuid

import numpy as np

from support import reference
from support.native import NONE, Layer
from support.storage import storage_of, to_float64, to_storage

WRITE, ADD = 1, 2
EPS, MOMENTUM = 1e-5, 0.9


AWKWARD = -0.5, 0, 1e-6, -1e-42  # gammas, of which all but one cannot be divided by


def parameters(channels, kind, gammas=AWKWARD, seed=7):
    """gamma and beta, the same on every device; the first gammas are given."""
    gamma, beta = np.random.default_rng(seed).normal(1, 0.3, (2, channels))
    gamma = np.maximum(gamma, 0.3)
    count = min(len(gammas), max(channels - 1, 0))
    gamma[:count] = gammas[:count]
    return gamma.astype(kind), beta.astype(kind)


def steps_of(request):
    """The number of steps: gradients that are added to are known after one."""
    return 1 if request == ADD else 2


class Device(threading.Thread):
    """One device's shard: training steps in a thread of its own."""

    def __init__(self, driver, layer, dtype, axis, x, dy, request, gammas):
        super().__init__(daemon=True)
        self._layer, self._step, self._request = layer, (dtype, x.shape), request
        channels = (x.shape[axis],)
        storage = storage_of(dtype)
        kind = np.float64 if dtype == "float64" else np.float32
        self.gamma, self.beta = parameters(*channels, kind, gammas)
        old = to_storage(np.full(x.shape, 0.5), dtype) if request == ADD else None
        ones = np.ones(channels)
        gradients = ones if request == ADD else None
        data = {"x": x, "dy": dy, "y": None, "dx": old}
        vectors = {
            "gamma": self.gamma,
            "beta": self.beta,
            "running_mean": 0 * ones,
            "running_var": ones,
            "dgamma": gradients,
            "dbeta": gradients,
        }
        self.memory = {
            **{name: driver.array(x.shape, storage, v) for name, v in data.items()},
            **{n: driver.array(channels, kind, v) for n, v in vectors.items()},
        }
        self.error = None

    def run(self):
        names = "y", "dx", "dgamma", "dbeta"
        requests = {f"{name}_request": self._request for name in names}
        requests["y_request"] = WRITE
        try:
            for _ in range(steps_of(self._request)):
                self._layer.forward(True, *self._step, **self.memory, **requests)
                self._layer.backward(*self._step, **self.memory, **requests)
        except RuntimeError as error:
            self.error = error
        finally:
            self._layer.close()

    def results(self):
        if self.error is not None:
            raise self.error
        return {name: array.get() for name, array in self.memory.items()}


def oracle(x, dy, gamma, beta, axis):
    """z, mean, var, dx, dgamma, dbeta of the whole batch, for a gradient of z."""
    z, mean, var, _ = reference.forward(x, gamma, beta, axis, EPS)
    return z, mean, var, *reference.backward(x, dy, gamma, axis, EPS)


def check_devices(
    driver,
    computes_on,
    dtype,
    shape,
    rows,
    axis,
    request,
    center=0.5,
    expected=oracle,
    activation=NONE,
    gammas=AWKWARD,
):
    """Runs `len(rows)` devices with that many rows each; compares all they write."""
    assert sum(rows) == shape[0]
    rng = np.random.default_rng()
    x = to_storage(rng.normal(center, 2, shape), dtype)
    function, slope, from_output = activation
    kind = np.float64 if dtype == "float64" else np.float32
    gamma, beta = (v.astype(float) for v in parameters(shape[axis], kind, gammas))
    x64 = to_float64(x, dtype)
    z = reference.forward(x64, gamma, beta, axis, EPS)[0]
    dy = rng.normal(size=shape)
    if function != "identity":
        # Rounding may decide on which side of the kink it is.
        dy[np.abs(z) <= 1e-4 * np.abs(z).max()] = 0
    dy = to_storage(dy, dtype)
    dy64 = to_float64(dy, dtype)
    dz64 = dy64 * reference.activation_gradient(z, function, slope)
    bounds = np.cumsum(rows)[:-1]
    group = uuid.uuid4().hex
    shards = zip(np.split(x, bounds), np.split(dy, bounds))
    devices = []
    for k, shard in enumerate(shards):
        place = f"gpu({k})", computes_on, len(rows)
        layer = Layer(group, *place, axis, EPS, MOMENTUM, activation=activation)
        devices.append(Device(driver, layer, dtype, axis, *shard, request, gammas))
    for device in devices:
        device.start()
    for device in devices:
        device.join()
    results = [device.results() for device in devices]

    z, mean, var, dx, dgamma, dbeta = expected(x64, dz64, gamma, beta, axis)
    y = reference.activate(z, function, slope)
    inv_std = 1 / np.sqrt(var + EPS)
    others = tuple(i for i in range(x.ndim) if i != axis)
    count = x.size // x.shape[axis]
    conditioning = np.max(np.abs(mean) * inv_std)
    columns = np.reshape(mean, [-1 if i == axis else 1 for i in range(x.ndim)])
    x_hat = np.abs((x64 - columns) * np.reshape(inv_std, columns.shape)).max()
    y_terms = np.abs(gamma).max() * x_hat + np.abs(beta).max()
    of_x_hat = from_output * reference.reconstruction_error(dtype, function, x_hat)
    old = 0.5 if request == ADD else 0.0

    def near(result, right, scale, stored=dtype, error=0):
        lane = min(driver.lane, count)
        limits = count, conditioning, scale, lane
        rtol, atol = reference.tolerance(stored, *limits)
        if lane > 0:
            atol = max(atol, reference.tolerance(dtype, *limits)[1])
        np.testing.assert_allclose(result, right, rtol, atol + error)

    def whole(name):
        return np.concatenate([to_float64(r[name], dtype) for r in results])

    vectors = "float64" if dtype == "float64" else "float32"
    near(whole("y"), y, 2 * max(slope, 1) * y_terms)
    dx_terms = np.max(np.abs(gamma * inv_std)) * np.max(np.abs(dz64)) * (1 + x_hat)
    near(
        whole("dx"),
        old + dx,
        dx_terms + old,
        error=2 * of_x_hat * dx_terms,
    )
    terms = np.abs(dz64).sum(others).max() * (1 + x_hat) + 1
    for name, right in ("dgamma", dgamma), ("dbeta", dbeta):
        # Each device's own sums; a trainer adds them up.
        total = sum(r[name].astype(float) for r in results)
        added = len(rows) if request == ADD else 0
        near(total, right + added, terms, vectors, error=of_x_hat * terms)
    running_mean, running_var = np.zeros_like(mean), np.ones_like(var)
    for _ in range(steps_of(request)):
        running_mean = reference.update_running(running_mean, mean, MOMENTUM)
        running_var = reference.update_running(running_var, var, MOMENTUM)
    for result in results:
        scale = np.max(np.abs(mean)) + np.max(var) + 1
        near(result["running_mean"], running_mean, scale, vectors)
        near(result["running_var"], running_var, scale, vectors)
        for name in "running_mean", "running_var":
            np.testing.assert_array_equal(result[name], results[0][name])
    return results
