"""The CPU kernels through their C interface, against the oracle; no operator."""

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
import reference

from gluon_syncbn import _library

DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 12}
LAYOUTS = [
    (1, 1, 1),
    (4, 3, 25),
    (2, 5, 1000),
    (8, 3, 40000),
    (50, 64, 1),
    (9000, 3, 1),
    (2, 2048, 1),
    (6, 40, 49),
]
GUARD = 64
BAD_DTYPE = 5


def to_storage(values, dtype):
    """`values` rounded to `dtype`; bfloat16 as its bits, cut off."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(values, dtype)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16)


def to_float64(stored, dtype):
    if dtype != "bfloat16":
        return stored.astype(np.float64)
    return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class Guarded:
    """An array between guard bytes, filled with NaN bits unless values are given."""

    def __init__(self, shape, storage, values=None):
        size = int(np.prod(shape)) * storage.itemsize
        self._bytes = np.full(size + 2 * GUARD, 0xFF, np.uint8)
        self.array = self._bytes[GUARD : GUARD + size].view(storage).reshape(shape)
        if values is not None:
            self.array[...] = values

    def check(self):
        assert (self._bytes[:GUARD] == 0xFF).all(), "written before the array"
        assert (self._bytes[-GUARD:] == 0xFF).all(), "written after the array"
        return self.array


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def call(name, dtype, shape, *arguments):
    """Calls a kernel as name(dtype, tensors..., outer, channels, inner, arguments...).

    A None among `arguments` stands for the shape; arrays become pointers.
    """
    converted = []
    for argument in arguments:
        if argument is None:
            converted += [ctypes.c_int64(n) for n in shape]
        elif isinstance(argument, np.ndarray):
            converted.append(pointer(argument))
        else:
            converted.append(argument)
    function = getattr(_library.load(), "gluon_syncbn_cpu_" + name)
    return function(ctypes.c_int(dtype), *converted)


def workspace(shape):
    function = _library.load().gluon_syncbn_cpu_workspace_bytes
    function.restype = ctypes.c_int64
    size = function(*(ctypes.c_int64(n) for n in shape))
    return Guarded((size,), np.dtype(np.uint8))


class Problem:
    """Data of one dtype and layout, and what four kernels and the oracle make of it."""

    def __init__(self, dtype, shape, center):
        rng = np.random.default_rng(sum(shape))
        self.dtype, self.shape = dtype, shape
        self.x = to_storage(rng.normal(center, 1, shape), dtype)
        self.dy = to_storage(rng.normal(0, 1, shape), dtype)
        self.gamma, self.beta = rng.normal(size=(2, shape[1]))
        self.x64, self.dy64 = to_float64(self.x, dtype), to_float64(self.dy, dtype)
        self.eps = 1e-5
        self.count = shape[0] * shape[2]
        self.conditioning = reference.conditioning(self.x64, eps=self.eps)

    def reduce(self, name, *tensors_and_mean):
        """The two results of local_moments or backward_sums."""
        *tensors, mean = tensors_and_mean
        first, second = (Guarded((self.shape[1],), np.dtype(float)) for _ in range(2))
        scratch = workspace(self.shape)
        mean = [] if mean is None else [mean]
        arguments = [*tensors, None, *mean, scratch.check(), first.array, second.array]
        assert call(name, DTYPES[self.dtype], self.shape, *arguments) == 0
        scratch.check()
        return first.check(), second.check()

    def apply(self, name, *arguments, old=None):
        """The tensor that normalize or backward_apply writes, or adds to `old`."""
        out = Guarded(self.shape, self.x.dtype, old)
        arguments = [*arguments, int(old is not None), out.array]
        assert call(name, DTYPES[self.dtype], self.shape, *arguments) == 0
        return to_float64(out.check(), self.dtype)

    def assert_near(self, result, expected, scale, dtype=None):
        rtol, atol = reference.tolerance(
            dtype or self.dtype, self.count, self.conditioning, scale
        )
        np.testing.assert_allclose(result, expected, rtol, atol)

    def run(self, old=None):
        """Moments, then y; sums, then dx: the layer on one device."""
        mean, m2 = self.reduce("local_moments", self.x, None)
        inv_std = 1 / np.sqrt(m2 / self.count + self.eps)
        scale = self.gamma * inv_std
        y = self.apply("normalize", self.x, None, mean, scale, self.beta, old=old)
        sum_dy, sum_dy_xmu = self.reduce("backward_sums", self.x, self.dy, mean)
        b = -scale * inv_std**2 * sum_dy_xmu / self.count
        d = -scale * sum_dy / self.count
        tensors = self.x, self.dy, None, mean
        dx = self.apply("backward_apply", *tensors, scale, b, d, old=old)
        return mean, m2, inv_std, y, sum_dy, sum_dy_xmu, dx


@pytest.mark.parametrize("center", [0.0, 1e4])
@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_on_one_device(dtype, shape, center):
    p = Problem(dtype, shape, center)
    mean, m2, inv_std, y, sum_dy, sum_dy_xmu, dx = p.run()
    expected_y, expected_mean, var, _ = reference.forward(
        p.x64, p.gamma, p.beta, eps=p.eps
    )
    expected_dx, dgamma, dbeta = reference.backward(p.x64, p.dy64, p.gamma, eps=p.eps)
    std = np.sqrt(var + p.eps)
    p.assert_near(mean / std, expected_mean / std, 1, "float64")
    p.assert_near(m2 / p.count / std**2, var / std**2, 1, "float64")
    p.assert_near(y, expected_y, np.abs(expected_y).max() + 2 * np.abs(p.beta).max())
    absolute = np.abs(p.dy64).sum((0, 2))
    x_hat = (p.x64 - expected_mean[:, None]) / std[:, None]
    p.assert_near(sum_dy / absolute, dbeta / absolute, 1, "float64")
    absolute *= np.abs(x_hat).max() + 1
    p.assert_near(sum_dy_xmu * inv_std / absolute, dgamma / absolute, 1, "float64")
    terms = np.abs(p.gamma * inv_std).max() * np.abs(p.dy64).max()
    p.assert_near(dx, expected_dx, terms * (1 + np.abs(x_hat).max()))


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_keeps_what_was_there(dtype, shape):
    p = Problem(dtype, shape, 0.0)
    old = to_storage(np.random.default_rng(3).normal(size=shape), dtype)
    *_, y, _, _, dx = p.run()
    *_, y_added, _, _, dx_added = p.run(old)
    old = to_float64(old, dtype)
    for result, alone in (y_added, y), (dx_added, dx):
        # Both were rounded when stored, `alone` with an error of its own.
        scale = np.abs(alone).max() + np.abs(old).max()
        u_out = reference.tolerance(dtype)[0]
        rtol, atol = reference.tolerance(dtype, scale=scale)
        atol += u_out * np.abs(alone).max()
        np.testing.assert_allclose(result, old + alone, rtol, atol)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0)])
def test_empty_shard_has_zero_sums(shape):
    p = Problem.__new__(Problem)
    p.dtype, p.shape = "float32", shape
    x = np.zeros(shape, np.float32)
    for result in p.reduce("local_moments", x, None):
        np.testing.assert_array_equal(result, 0)
    for result in p.reduce("backward_sums", x, x, np.zeros(3)):
        np.testing.assert_array_equal(result, 0)


def test_unknown_dtype_is_refused():
    x, out = np.ones((1, 1, 1), np.float32), np.zeros(1)
    scratch = workspace(x.shape).array
    arguments = x, None, scratch, out, out
    assert call("local_moments", BAD_DTYPE, x.shape, *arguments) == -1


def _digest():
    """Every bit that the kernels give; runs in processes of its own."""
    for dtype in DTYPES:
        for shape in LAYOUTS:
            for result in Problem(dtype, shape, 1.0).run():
                sys.stdout.buffer.write(np.ascontiguousarray(result).tobytes())


def test_same_bits_for_any_number_of_threads():
    def run(threads):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        command = [sys.executable, __file__]
        return subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, check=True, timeout=120
        ).stdout

    one = run(1)
    assert len(one) > 0
    assert run(2) == one
    assert run(5) == one


if __name__ == "__main__":
    _digest()
