"""The layer on several devices of one process, a thread each, against the whole batch.

Called by test_op.py (CPU) and gpu/test_gpu_layer.py, each with its driver, see
native.py. No MXNet takes part.
"""

import threading
import uuid

import numpy as np
import reference
from native import Layer
from storage import storage_of, to_float64, to_storage

WRITE, ADD = 1, 2
EPS, MOMENTUM = 1e-5, 0.9


class Device(threading.Thread):
    """One device's shard: two training steps in a thread of its own."""

    def __init__(self, driver, computes_on, group, rank, count, dtype, axis, x, dy, request):
        super().__init__(daemon=True)
        self.driver, self.dtype, self.shape, self.request = driver, dtype, x.shape, request
        self._layer = Layer(group, f"gpu({rank})", computes_on, count, axis, EPS, MOMENTUM)
        channels = (x.shape[axis],)
        storage = storage_of(dtype)
        self.vectors = np.float64 if dtype == "float64" else np.float32
        rng = np.random.default_rng(7)  # the same parameters on every device
        self.gamma, self.beta = rng.normal(1, 0.3, (2, *channels)).astype(self.vectors)
        old = to_storage(np.full(x.shape, 0.5), dtype) if request == ADD else None
        ones = np.ones(channels)
        data, vector = driver.array, driver.array
        self.memory = {
            "x": data(x.shape, storage, x),
            "dy": data(x.shape, storage, dy),
            "y": data(x.shape, storage),
            "dx": data(x.shape, storage, old),
            "gamma": vector(channels, self.vectors, self.gamma),
            "beta": vector(channels, self.vectors, self.beta),
            "running_mean": vector(channels, self.vectors, 0 * ones),
            "running_var": vector(channels, self.vectors, ones),
            "dgamma": vector(channels, self.vectors, ones if request == ADD else None),
            "dbeta": vector(channels, self.vectors, ones if request == ADD else None),
        }
        self.error = None

    def run(self):
        names = "y", "dx", "dgamma", "dbeta"
        requests = {f"{name}_request": self.request for name in names}
        requests["y_request"] = WRITE
        try:
            for _ in range(2 if self.request == WRITE else 1):
                step = self.dtype, self.shape
                self._layer.forward(True, *step, **self.memory, **requests)
                self._layer.backward(*step, **self.memory, **requests)
        except RuntimeError as error:
            self.error = error
        finally:
            self._layer.close()

    def results(self):
        if self.error is not None:
            raise self.error
        return {name: array.get() for name, array in self.memory.items()}


def oracle(x, dy, gamma, beta, axis):
    """y, mean, var, dx, dgamma, dbeta of the whole batch."""
    y, mean, var, _ = reference.forward(x, gamma, beta, axis, EPS)
    return y, mean, var, *reference.backward(x, dy, gamma, axis, EPS)


def check_devices(
    driver, computes_on, dtype, shape, rows, axis, request, center=0.5, expected=oracle
):
    """Runs `len(rows)` devices with that many rows each; compares everything they write."""
    assert sum(rows) == shape[0]
    rng = np.random.default_rng()
    x = to_storage(rng.normal(center, 2, shape), dtype)
    dy = to_storage(rng.normal(size=shape), dtype)
    bounds = np.cumsum(rows)[:-1]
    group = uuid.uuid4().hex
    shards = zip(np.split(x, bounds), np.split(dy, bounds))
    devices = [
        Device(driver, computes_on, group, k, len(rows), dtype, axis, *shard, request)
        for k, shard in enumerate(shards)
    ]
    for device in devices:
        device.start()
    for device in devices:
        device.join()
    results = [device.results() for device in devices]

    x64, dy64 = to_float64(x, dtype), to_float64(dy, dtype)
    gamma, beta = (v.astype(float) for v in (devices[0].gamma, devices[0].beta))
    y, mean, var, dx, dgamma, dbeta = expected(x64, dy64, gamma, beta, axis)
    inv_std = 1 / np.sqrt(var + EPS)
    others = tuple(i for i in range(x.ndim) if i != axis)
    count = x.size // x.shape[axis]
    conditioning = np.max(np.abs(mean) * inv_std)
    x_hat = np.max(np.abs(y - np.mean(beta))) + np.max(np.abs(beta))
    old = 0.5 if request == ADD else 0.0

    def near(result, right, scale, stored=dtype):
        lane = min(driver.lane, count)
        limits = count, conditioning, scale, lane
        rtol, atol = reference.tolerance(stored, *limits)
        if lane > 0:
            atol = max(atol, reference.tolerance(dtype, *limits)[1])
        np.testing.assert_allclose(result, right, rtol, atol)

    def whole(name):
        return np.concatenate([to_float64(r[name], dtype) for r in results])

    vectors = "float64" if dtype == "float64" else "float32"
    near(whole("y"), y, 2 * x_hat)
    dx_scale = np.max(np.abs(gamma * inv_std)) * np.max(np.abs(dy64)) * (1 + x_hat) + old
    near(whole("dx"), old + dx, dx_scale)
    terms = np.abs(dy64).sum(others).max() * (1 + x_hat) + 1
    for name, right in ("dgamma", dgamma), ("dbeta", dbeta):
        # Each device's own sums; a trainer adds them up.
        total = sum(r[name].astype(float) for r in results)
        near(total, right + (len(rows) if request == ADD else 0), terms, vectors)
    running_mean, running_var = np.zeros_like(mean), np.ones_like(var)
    for _ in range(2 if request == WRITE else 1):
        running_mean = reference.update_running(running_mean, mean, MOMENTUM)
        running_var = reference.update_running(running_var, var, MOMENTUM)
    for result in results:
        scale = np.max(np.abs(mean)) + np.max(var) + 1
        near(result["running_mean"], running_mean, scale, vectors)
        near(result["running_var"], running_var, scale, vectors)
        for name in "running_mean", "running_var":
            np.testing.assert_array_equal(result[name], results[0][name])
    return results
