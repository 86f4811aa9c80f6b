"""The checks of test_gpu_layer.py on CPUs, so that they work when a GPU comes."""

import pytest
from support.layer_checks import ADD, Case, check_devices
from support.native import Activation, CpuDriver
from support.storage import DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
def test_devices_equal_the_whole_batch(dtype):
    activation = Activation("leaky_relu", 0.01, from_output=True)
    shape, rows = (6, 9, 7, 5), [3, 0, 2, 1]
    case = Case(dtype, shape, rows, request=ADD, activation=activation)
    check_devices(CpuDriver(), case)
