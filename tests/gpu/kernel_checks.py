"""Checks against the oracle that the CUDA kernels must pass.

Called by test_gpu_kernels.py with a driver, see cuda_driver.py; tests/cpp checks the
kernels of the CPU, and these in emulation.
"""

import numpy as np
from kernel_passes import ADD, PASSES, WRITE, Activation
from support import reference
from support.native import NONE
from support.storage import storage_of, to_float64, to_storage


class Problem:
    """Data of one dtype and layout, and the four kernels on it."""

    def __init__(self, driver, dtype, shape, center=0.0, misalign=0, seed=None):
        rng = np.random.default_rng(sum(shape) if seed is None else seed)
        self.driver, self.dtype, self.shape = driver, dtype, shape
        self.misalign = misalign
        x = to_storage(rng.normal(center, 1, shape), dtype)
        dy = to_storage(rng.normal(0, 1, shape), dtype)
        self.x, self.dy = self.tensor(x), self.tensor(dy)
        self.x64, self.dy64 = to_float64(x, dtype), to_float64(dy, dtype)
        self.gamma, self.beta = rng.normal(size=(2, shape[1]))
        self.eps = 1e-5
        self.count = shape[0] * shape[2]

    def tensor(self, values=None):
        storage = storage_of(self.dtype)
        return self.driver.array(self.shape, storage, values, self.misalign)

    def vector(self, values=None):
        return self.driver.array((self.shape[1],), np.float64, values)

    def call(self, name, **members):
        for key, value in members.items():
            if isinstance(value, np.ndarray):
                members[key] = self.vector(value)
        scratch = None
        if len(PASSES[name][1]) == 2:
            scratch = self.driver.workspace(self.dtype, self.shape)
        status = self.driver.call(name, self.dtype, self.shape, scratch, **members)
        assert status == 0, name
        if scratch is not None:
            scratch.get()

    def reduce(self, name, **members):
        """The two results of local_moments or backward_sums."""
        results = {result: self.vector() for result in PASSES[name][1]}
        self.call(name, **members, **results)
        return [result.get() for result in results.values()]

    def apply(self, name, old=None, **members):
        """The tensor that normalize or backward_apply writes, or adds to `old`."""
        (result,), out = PASSES[name][1], self.tensor(old)
        request = WRITE if old is None else ADD
        self.call(name, **members, request=request, **{result: out})
        return to_float64(out.get(), self.dtype)

    def run(self, old=None):
        """Moments, then y; sums, then dx: the layer on one device."""
        mean, m2 = self.reduce("local_moments", x=self.x)
        inv_std = 1 / np.sqrt(m2 / self.count + self.eps)
        scale = self.gamma * inv_std
        of_y = {"mean": mean, "scale": scale, "offset": self.beta}
        y = self.apply("normalize", old, x=self.x, activation=code(NONE), **of_y)
        of_t = {"t": self.x, "dy": self.dy, "activation": code(NONE), "mean": mean}
        sums = self.reduce("backward_sums", **of_t)
        b = -scale * inv_std**2 * sums[1] / self.count
        d = -scale * sums[0] / self.count
        dx = self.apply("backward_apply", old, **of_t, a=scale, b=b, d=d)
        return mean, m2, inv_std, y, *sums, dx

    def assert_near(self, result, expected, scale, dtype=None):
        """`dtype` is what the result is stored in, if not the data's."""
        conditioning = reference.conditioning(self.x64, eps=self.eps)
        lane = min(self.driver.lane, self.count)
        bounds = self.count, conditioning, scale, lane
        rtol, atol = reference.tolerance(dtype or self.dtype, *bounds)
        if lane > 0:  # sums are in the data's arithmetic, whatever they are stored in
            atol = max(atol, reference.tolerance(self.dtype, *bounds)[1])
        np.testing.assert_allclose(result, expected, rtol, atol)


def code(activation):
    return Activation(*activation.arguments()[:2])


def check_layer_on_one_device(p):
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


def check_add_keeps_what_was_there(p):
    old = to_storage(np.random.default_rng(3).normal(size=p.shape), p.dtype)
    *_, y, _, _, dx = p.run()
    *_, y_added, _, _, dx_added = p.run(old)
    old = to_float64(old, p.dtype)
    for result, alone in (y_added, y), (dx_added, dx):
        # Both were rounded when stored, `alone` with an error of its own.
        scale = np.abs(alone).max() + np.abs(old).max()
        u_out = reference.tolerance(p.dtype)[0]
        rtol, atol = reference.tolerance(p.dtype, scale=scale)
        atol += u_out * np.abs(alone).max()
        np.testing.assert_allclose(result, old + alone, rtol, atol)


def check_empty_shard_has_zero_sums(driver, shape):
    p = Problem(driver, "float32", shape)
    for result in p.reduce("local_moments", x=p.x):
        np.testing.assert_array_equal(result, 0)
    of_t = {"t": p.x, "dy": p.dy, "activation": code(NONE), "mean": np.zeros(shape[1])}
    for result in p.reduce("backward_sums", **of_t):
        np.testing.assert_array_equal(result, 0)


def inverse(y, function, slope):
    """z of f(z) = y."""
    if function == "identity":
        return y
    return np.where(y > 0, y, np.minimum(y, 0) / slope)


def check_activation(p, activation):
    """Each kernel with an activation, on numbers that have nothing to do with moments.

    Where x decides on which side of the kink an element is, rounding may decide
    otherwise for those next to it: their dy is 0.
    """
    mean, scale, offset, a, b, d = np.random.default_rng(5).normal(size=(6, p.shape[1]))
    mean, scale = mean + p.x64.mean((0, 2)), scale + np.sign(scale)
    column = np.s_[:, None]
    function, slope, from_output = activation
    z = (p.x64 - mean[column]) * scale[column] + offset[column]
    affine = {"scale": scale, "offset": offset}
    y = p.apply("normalize", x=p.x, mean=mean, activation=code(activation), **affine)
    expected = reference.activate(z, function, slope)
    sizes = np.abs(z).max() + 2 * np.abs(offset).max()
    p.assert_near(y, expected, max(slope, 1) * sizes)

    t, u = p.x, p.x64 - mean[column]
    if from_output:
        z = inverse(p.x64, function, slope)
        mean, u = offset, z - offset[column]
    else:
        near_the_kink = np.abs(z) <= 1e-4 * sizes
        p.dy64[near_the_kink] = 0
        p.dy = p.tensor(to_storage(p.dy64, p.dtype))
    dz = p.dy64 * reference.activation_gradient(z, function, slope)
    of_t = {"t": t, "dy": p.dy, "activation": code(activation), "mean": mean}
    of_t.update({"from_output": True} if from_output else affine)
    sum_dz, sum_dz_u = p.reduce("backward_sums", **of_t)
    absolute = np.abs(dz).sum((0, 2)) + 1e-30
    p.assert_near(sum_dz / absolute, dz.sum((0, 2)) / absolute, 2, "float64")
    absolute *= np.abs(u).max() + np.abs(mean).max()
    p.assert_near(sum_dz_u / absolute, (dz * u).sum((0, 2)) / absolute, 2, "float64")
    for old in None, to_storage(np.full(p.shape, 0.25), p.dtype):
        dx = p.apply("backward_apply", old, **of_t, a=a, b=b, d=d)
        expected = a[column] * dz + b[column] * u + d[column] + (old is not None) * 0.25
        terms = np.abs(a).max() * np.abs(dz).max() + np.abs(d).max() + 0.25
        terms += np.abs(b).max() * (np.abs(u).max() + np.abs(mean).max())
        p.assert_near(dx, expected, 2 * terms)
