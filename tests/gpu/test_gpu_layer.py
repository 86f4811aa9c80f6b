"""The layer on several simulated devices of one GPU, through the real exchange.

Each is a host thread with a stream of its own; all of them use gpu(0)'s memory. The
expected values are PyTorch's, of the whole batch in float64. No MXNet takes part.

`bash scripts/check_gpu.sh` runs this file, and keeps pytest from loading the
conftest.py of the folder above, which needs MXNet.
"""

import threading

import numpy as np
import pytest
from support.layer_checks import ADD, EPS, WRITE, Case, check_devices
from support.native import ACTIVATIONS, NONE, Activation, CpuDriver, Layer, library
from support.storage import DTYPES, GUARD, HostArray

torch = pytest.importorskip("torch", reason="needs PyTorch, for memory and results")

LEAKY_FROM_OUTPUT = Activation("leaky_relu", 0.01, True)  # keeps some channels' x

SHAPES = [
    ((7, 6, 9, 11), 1),
    ((7, 64, 32, 32), 1),
    ((7, 12, 13, 64), 3),
    ((7, 24, 1, 1), 1),
    ((7, 16, 7, 7), 1),
    ((7, 33), 1),
]


class DeviceArray(HostArray):
    """The same in memory of PyTorch on the GPU."""

    def __init__(self, shape, storage, values=None):
        super().__init__(shape, storage, values)
        self._on_gpu = torch.from_numpy(self._bytes).cuda()
        torch.cuda.synchronize()  # the layer's own stream does not wait for PyTorch's

    @property
    def pointer(self):
        return self._on_gpu.data_ptr() + GUARD

    def get(self):
        torch.cuda.synchronize()
        self._bytes = self._on_gpu.cpu().numpy()
        return super().get()


class CudaDriver:
    """The current GPU and PyTorch's memory."""

    device = "gpu(0)"
    # Additions in float32 on the way of one term: kFoldEvery rounds of two vectors of
    # four lanes each, then the lanes, see src/kernels/cuda/sums.cuh; totals are fewer.
    lane = 2 * 136
    array = DeviceArray


@pytest.fixture(scope="module")
def driver():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if not library().gluon_syncbn_cuda_architectures():
        pytest.skip("the library was built without CUDA")
    return CudaDriver()


def torch_whole_batch(x, dz, gamma, beta, axis):
    """The results of layer_checks.oracle by PyTorch on the GPU."""

    def on_gpu(array):
        return torch.from_numpy(np.ascontiguousarray(array)).cuda()

    inputs = on_gpu(np.moveaxis(x, axis, 1)).requires_grad_()
    gradient = on_gpu(np.moveaxis(dz, axis, 1))
    gamma, beta = (on_gpu(v).requires_grad_() for v in (gamma, beta))
    y = torch.nn.functional.batch_norm(
        inputs, None, None, gamma, beta, training=True, eps=EPS
    )
    y.backward(gradient)
    others = [i for i in range(x.ndim) if i != 1]
    moments = inputs.mean(others), inputs.var(others, correction=0)

    def back(tensor):
        return np.moveaxis(tensor.detach().cpu().numpy(), 1, axis)

    vectors = (v.detach().cpu().numpy() for v in (*moments, gamma.grad, beta.grad))
    mean, var, dgamma, dbeta = vectors
    return back(y), mean, var, back(inputs.grad), dgamma, dbeta


@pytest.mark.parametrize("request_kind", [WRITE, ADD], ids=["write", "add"])
@pytest.mark.parametrize("rows", [[7], [4, 3], [3, 0, 2, 2]], ids=str)
@pytest.mark.parametrize("shape, axis", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_devices_equal_the_whole_batch(dtype, shape, axis, rows, request_kind, driver):
    case = Case(dtype, shape, rows, axis, request_kind)
    check_devices(driver, case, torch_whole_batch)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("request_kind", [WRITE, ADD], ids=["write", "add"])
@pytest.mark.parametrize("shape, axis", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_of_the_whole_batch(
    dtype, shape, axis, request_kind, activation, driver
):
    case = Case(dtype, shape, [4, 3], axis, request_kind, activation=activation)
    check_devices(driver, case, torch_whole_batch)


@pytest.mark.parametrize("count", [2, 8])
def test_mean_far_from_zero(count, driver):
    case = Case("float32", (16, 5, 40, 40), [16 // count] * count, center=1e4)
    check_devices(driver, case, torch_whole_batch)


def test_cpu_and_gpu_side_by_side(driver):
    """Two groups at once in one process, one on CPUs and one on GPUs."""
    errors = []

    def run(kind):
        try:
            for _ in range(5):
                check_devices(kind, Case("float32", (6, 8, 20, 20), [3, 3]))
        except BaseException as error:
            errors.append(error)

    kinds = CpuDriver(), driver
    threads = [threading.Thread(target=run, args=(kind,)) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@pytest.mark.parametrize("activation", [NONE, LEAKY_FROM_OUTPUT], ids=str)
def test_steps_after_the_first_allocate_nothing(activation, driver):
    """Also those of new operators, as an imperative layer has for each call."""

    def steps(count):
        for _ in range(count):
            case = Case("float32", (4, 64, 30, 30), [4], activation=activation)
            check_devices(driver, case)
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    free = steps(2)
    assert steps(20) == free


def test_a_gpu_that_is_not_there(driver):
    count = torch.cuda.device_count()
    text = rf"SyncBatchNorm on gpu\({count}\): this process sees {count} CUDA devices"
    with pytest.raises(RuntimeError, match=text):
        Layer("a layer", "gpu(0)", f"gpu({count})", 1)


def test_the_current_device_is_restored(driver):
    torch.cuda.set_device(0)
    before = torch.cuda.current_device()
    check_devices(driver, Case("float32", (4, 3, 5, 5), [2, 2]))
    assert torch.cuda.current_device() == before
