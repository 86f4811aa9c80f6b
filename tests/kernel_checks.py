"""What the kernels of every device must satisfy, against the oracle.

Called by test_kernels.py (CPU) and gpu/test_gpu_kernels.py, each with its driver, see
native.py.
"""

import numpy as np
import reference
from native import NONE, SHAPE
from storage import storage_of, to_float64, to_storage


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

    def call(self, name, *arguments):
        status = self.driver.call(name, self.dtype, self.shape, *arguments)
        assert status == 0, name

    def reduce(self, name, *arguments):
        """The two results of local_moments or backward_sums."""
        first, second = self.vector(), self.vector()
        scratch = self.driver.workspace(self.dtype, self.shape)
        self.call(name, *self.held(arguments), scratch, first, second)
        scratch.get()
        return first.get(), second.get()

    def apply(self, name, *arguments, old=None):
        """The tensor that normalize or backward_apply writes, or adds to `old`."""
        out = self.tensor(old)
        self.call(name, *self.held(arguments), int(old is not None), out)
        return to_float64(out.get(), self.dtype)

    def held(self, arguments):
        """The arguments, vectors among them in the driver's memory."""
        return [self.vector(a) if isinstance(a, np.ndarray) else a for a in arguments]

    def run(self, old=None):
        """Moments, then y; sums, then dx: the layer on one device."""
        mean, m2 = self.reduce("local_moments", self.x, SHAPE)
        inv_std = 1 / np.sqrt(m2 / self.count + self.eps)
        scale = self.gamma * inv_std
        function, slope, _ = NONE.arguments()
        affine = mean, scale, self.beta
        y = self.apply("normalize", self.x, SHAPE, *affine, function, slope, old=old)
        tensors = self.x, self.dy, SHAPE, *NONE.arguments(), None, None, mean
        sums = self.reduce("backward_sums", *tensors)
        b = -scale * inv_std**2 * sums[1] / self.count
        d = -scale * sums[0] / self.count
        dx = self.apply("backward_apply", *tensors, scale, b, d, old=old)
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
    for result in p.reduce("local_moments", p.x, SHAPE):
        np.testing.assert_array_equal(result, 0)
    tensors = p.x, p.dy, SHAPE, *NONE.arguments(), None, None
    for result in p.reduce("backward_sums", *tensors, np.zeros(shape[1])):
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
    code = activation.arguments()
    y = p.apply("normalize", p.x, SHAPE, mean, scale, offset, *code[:2])
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
    affine = (None, None) if from_output else (scale, offset)
    arguments = t, p.dy, SHAPE, *code, *affine, mean
    sum_dz, sum_dz_u = p.reduce("backward_sums", *arguments)
    absolute = np.abs(dz).sum((0, 2)) + 1e-30
    p.assert_near(sum_dz / absolute, dz.sum((0, 2)) / absolute, 2, "float64")
    absolute *= np.abs(u).max() + np.abs(mean).max()
    p.assert_near(sum_dz_u / absolute, (dz * u).sum((0, 2)) / absolute, 2, "float64")
    for old in None, to_storage(np.full(p.shape, 0.25), p.dtype):
        dx = p.apply("backward_apply", *arguments, a, b, d, old=old)
        expected = a[column] * dz + b[column] * u + d[column] + (old is not None) * 0.25
        terms = np.abs(a).max() * np.abs(dz).max() + np.abs(d).max() + 0.25
        terms += np.abs(b).max() * (np.abs(u).max() + np.abs(mean).max())
        p.assert_near(dx, expected, 2 * terms)
