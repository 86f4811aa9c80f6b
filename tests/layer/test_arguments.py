"""Bad arguments and dtypes: one sentence, as early as can be."""

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

import mxnet as mx
import pytest
from mxnet import autograd
from support.blocks import by_gluon
from support.helpers import output_of, run_python
from support.mistakes import (
    assert_trains,
    failure_of,
    make_layer,
    make_shards,
    map_and_wait,
)  # fmt: skip


def test_timeout_of_the_environment_is_a_positive_number():
    program = "import gluon_syncbn; print(gluon_syncbn.get_timeout())"
    assert output_of(program, GLUON_SYNCBN_TIMEOUT="7.5") == "7.5\n"
    error = run_python(program, GLUON_SYNCBN_TIMEOUT="soon").stderr.splitlines()[-1]
    assert error.startswith("ValueError: GLUON_SYNCBN_TIMEOUT") and "'soon'" in error


@pytest.mark.parametrize("seconds", [9.3e9, 1e10, 10**400, float("inf")])
def test_timeout_beyond_all_bounds_means_never(seconds, devices):
    gluon_syncbn.set_timeout(seconds)
    for timeout in None, seconds:
        assert_trains(devices, make_layer(devices.contexts, timeout, num_devices=2))


@pytest.mark.parametrize("axis", [4, -5])
def test_axis_outside_of_the_input(axis, devices):
    layer = SyncBatchNorm(axis=axis, in_channels=3, num_devices=2)
    layer.initialize(ctx=devices.contexts)
    text = f"'{layer.name}'.*axis.*{axis}.*4"
    with pytest.raises(by_gluon(mx.MXNetError, ValueError), match=text):
        with autograd.train_mode():
            map_and_wait(devices, layer, make_shards(devices))


def test_parameters_in_float16(devices):
    layer = make_layer(devices.contexts, num_devices=2)
    layer.gamma.cast("float16")
    with autograd.train_mode():
        text = failure_of(map_and_wait, devices, layer, make_shards(devices))
    assert f"'{layer.name}'" in text and "float32 or float64" in text and "cast" in text
    layer.cast("float32")
    layer.gamma.cast("float32")
    assert_trains(devices, layer)


def test_data_of_integers(devices):
    layer = make_layer(devices.contexts, num_devices=2)
    for dtype in "int32", "uint8":
        shards = [x.astype(dtype) for x in make_shards(devices)]
        with autograd.train_mode():
            text = failure_of(map_and_wait, devices, layer, shards)
        assert f"'{layer.name}'" in text and dtype in text
        gluon_syncbn.recover()
    assert_trains(devices, layer)
