"""The layer through its C interface on CPUs passes the same checks as on GPUs.

These tests need no MXNet; test_batch_norm.py and others test the layer in MXNet.
"""

import pytest
from support import native
from support.layer_checks import ADD, WRITE, Case, check_devices
from support.native import ACTIVATIONS, NONE, CpuDriver
from support.storage import DTYPES


@pytest.mark.parametrize("request_kind", [WRITE, ADD], ids=["write", "add"])
@pytest.mark.parametrize("rows", [[6], [4, 2], [3, 0, 2, 1]], ids=str)
@pytest.mark.parametrize("shape, axis", [((6, 3, 4, 5), 1), ((6, 4, 5, 8), 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_devices_equal_the_whole_batch(dtype, shape, axis, rows, request_kind):
    check_devices(CpuDriver(), Case(dtype, shape, rows, axis, request_kind))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("request_kind", [WRITE, ADD], ids=["write", "add"])
@pytest.mark.parametrize("shape, axis", [((6, 9, 40, 5), 1), ((6, 4, 5, 8), 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_of_the_whole_batch(dtype, shape, axis, request_kind, activation):
    case = Case(dtype, shape, [4, 2], axis, request_kind, activation=activation)
    check_devices(CpuDriver(), case)


@pytest.mark.parametrize("activation", [NONE, *ACTIVATIONS], ids=str)
@pytest.mark.parametrize("request_kind", [WRITE, ADD], ids=["write", "add"])
@pytest.mark.parametrize("rows", [[4], [3, 1]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_x_is_kept(dtype, rows, request_kind, activation):
    """Every channel can be reconstructed; passes over this shape have several tiles."""
    settings = {"request": request_kind, "activation": activation, "gammas": [-0.5]}
    check_devices(CpuDriver(), Case(dtype, (4, 32, 40, 40), rows, **settings))


def test_a_gpu_that_is_not_there():
    """Without CUDA the error says how to build; with it, what the runtime refuses."""
    with pytest.raises(RuntimeError) as caught:
        native.Layer("a layer", "gpu(0)", "gpu(4711)", 1)
    text = str(caught.value)
    assert text.startswith("SyncBatchNorm on gpu(4711): ")
    if native.library().gluon_syncbn_cuda_architectures():
        assert "cudaGetDeviceCount" in text or "CUDA devices" in text
    else:
        assert "`GLUON_SYNCBN_CUDA=1 pip install .`" in text


def test_unknown_dtype_is_refused():
    layer = native.Layer("of another dtype", "cpu(0)", "cpu(0)", 1)
    with pytest.raises(RuntimeError, match="^no kernels for dtype number 5$"):
        layer.forward(True, 5, (2, 3, 4))
    layer.close()
