"""The CPU kernels through their C interface, against the oracle."""

import os
import subprocess
import sys

import kernel_checks
import numpy as np
import pytest
from kernel_checks import Problem
from native import ACTIVATIONS, SHAPE, CpuDriver
from storage import DTYPES

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
BAD_DTYPE = 5


@pytest.mark.parametrize("center", [0.0, 1e4])
@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_on_one_device(dtype, shape, center):
    kernel_checks.check_layer_on_one_device(Problem(CpuDriver(), dtype, shape, center))


@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_keeps_what_was_there(dtype, shape):
    kernel_checks.check_add_keeps_what_was_there(Problem(CpuDriver(), dtype, shape))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("shape", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation(dtype, shape, activation):
    kernel_checks.check_activation(Problem(CpuDriver(), dtype, shape), activation)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0)])
def test_empty_shard_has_zero_sums(shape):
    kernel_checks.check_empty_shard_has_zero_sums(CpuDriver(), shape)


def test_unknown_dtype_is_refused():
    p = Problem(CpuDriver(), "float32", (1, 1, 1))
    scratch, out = p.driver.workspace("float32", p.shape), p.vector()
    arguments = p.x, SHAPE, scratch, out, out
    assert p.driver.call("local_moments", BAD_DTYPE, p.shape, *arguments) == -1


def _digest():
    """Every bit that the kernels give; runs in processes of its own."""
    for dtype in DTYPES:
        for shape in LAYOUTS:
            for result in Problem(CpuDriver(), dtype, shape, 1.0).run():
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
