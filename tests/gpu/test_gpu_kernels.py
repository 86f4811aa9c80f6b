"""The CUDA kernels through their C interface, against the float64 oracle.

Fresh random data in every run; outputs and scratch start as NaN between guard bytes.
"""

import random

import kernel_checks
import numpy as np
import pytest
from kernel_checks import Problem, code
from kernel_passes import WRITE
from support.native import ACTIVATIONS, NONE, last_error
from support.storage import DTYPES

# (outer, channels, inner): large planes, channels-last, small planes, few and many
# channels, lengths that no vector divides.
LAYOUTS = [
    (1, 1, 1),
    (4, 3, 25),
    (2, 5, 1000),
    (3, 4, 1023),
    (8, 3, 40000),
    (1, 2, 300001),
    (50, 64, 1),
    (9000, 3, 1),
    (9000, 8, 1),
    (28800, 64, 1),
    (7, 1025, 1),
    (2, 2048, 1),
    (6, 40, 49),
    (5, 48, 196),
    (3, 16, 225),
    (4, 9000, 4),
    (300, 19, 129),
]
LARGE = [(4, 64, 16641), (66564, 256, 1), (8, 2048, 49)]
BAD_DTYPE = 5


def fresh(driver, dtype, shape, center=0.0, misalign=0):
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")  # shown if the test fails
    return Problem(driver, dtype, shape, center, misalign, seed)


@pytest.mark.parametrize("center", [0.0, 1e4])
@pytest.mark.parametrize("misalign", [0, 1])
@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_on_one_device(dtype, shape, misalign, center, driver):
    p = fresh(driver, dtype, shape, center, misalign)
    kernel_checks.check_layer_on_one_device(p)


@pytest.mark.parametrize("misalign", [0, 3])
@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_keeps_what_was_there(dtype, shape, misalign, driver):
    p = fresh(driver, dtype, shape, misalign=misalign)
    kernel_checks.check_add_keeps_what_was_there(p)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("misalign", [0, 1])
@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation(dtype, shape, misalign, activation, driver):
    p = fresh(driver, dtype, shape, misalign=misalign)
    kernel_checks.check_activation(p, activation)


@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_large(dtype, shape, driver):
    kernel_checks.check_layer_on_one_device(fresh(driver, dtype, shape, 3.0))


@pytest.mark.parametrize("shape", LAYOUTS + LARGE[:1], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_in_every_run(dtype, shape, driver):
    p = fresh(driver, dtype, shape)
    first = p.run()
    for _ in range(3):
        for result, again in zip(first, p.run()):
            np.testing.assert_array_equal(result, again)


@pytest.mark.parametrize("shape", [(6, 40, 49), (3, 4, 1023), (50, 64, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_that_lie_differently(dtype, shape, driver):
    """x on a vector's boundary, y and dy not: read and written element by element."""
    p = fresh(driver, dtype, shape)
    p.misalign = 1
    p.dy = p.tensor(p.dy.get())
    kernel_checks.check_layer_on_one_device(p)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (0, 8, 5000)], ids=str)
def test_empty_shard_has_zero_sums(shape, driver):
    kernel_checks.check_empty_shard_has_zero_sums(driver, shape)


def test_unknown_dtype_is_refused(driver):
    p = fresh(driver, "float32", (1, 1, 1))
    scratch, out = driver.workspace("float32", p.shape), p.vector()
    members = {"x": p.x, "mean": out, "m2": out}
    assert driver.call("local_moments", BAD_DTYPE, p.shape, scratch, **members) == -1
    assert last_error() == f"no kernels for dtype number {BAD_DTYPE}"


@pytest.mark.parametrize("channels_last", [False, True])
def test_more_than_2_to_the_31_elements(channels_last, driver):
    import torch

    shape = (2**28 + 3, 8, 1) if channels_last else (3, 4, 2**28 - 5)
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GB of free GPU memory")
    count = shape[0] * shape[2]
    x = torch.empty(shape, dtype=torch.float16, device="cuda").normal_(5, 2)
    y = torch.full_like(x, float("nan"))
    mean, m2 = torch.full((2, shape[1]), float("nan"), device="cuda").double()
    ones, zeros = torch.ones_like(mean), torch.zeros_like(mean)
    scratch = torch.zeros(
        driver.workspace_bytes("float16", shape), dtype=torch.uint8, device="cuda"
    )

    def call(name, workspace, **tensors):
        members = {
            key: t.data_ptr() if torch.is_tensor(t) else t for key, t in tensors.items()
        }
        assert driver.call(name, "float16", shape, workspace, **members) == 0

    call("local_moments", Pointer(scratch), x=x, mean=mean, m2=m2)
    affine = {"mean": mean, "scale": ones, "offset": zeros}
    call("normalize", None, x=x, **affine, activation=code(NONE), request=WRITE, y=y)
    for c in range(shape[1]):
        values = x[:, c].double()
        torch.testing.assert_close(mean[c], values.mean(), rtol=1e-6, atol=0)
        variance = values.var(correction=0)
        torch.testing.assert_close(m2[c] / count, variance, rtol=1e-5, atol=0)
        error = (y[:, c].double() - (values - mean[c])).abs().max()
        assert error < 2**-11 * 16, (c, error)  # half a unit of values up to 16


class Pointer:
    def __init__(self, tensor):
        self.pointer = tensor.data_ptr()
