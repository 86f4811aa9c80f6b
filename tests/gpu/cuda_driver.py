"""Memory (PyTorch's) and kernels of a GPU for the checks, see support/native.py.

Called by the tests of this folder. No MXNet: its own kernels run on no GPU newer than
sm_89, ours do.
"""

import ctypes

import numpy as np
import torch
from kernel_passes import PASSES, Layout, MomentsPass
from support.native import last_error, library
from support.storage import DTYPES, GUARD, unguarded

# Additions in float32 on the way of one term: kFoldEvery rounds of two vectors of four
# lanes each, then the lanes, see src/kernels/cuda/sums.cuh; totals are fewer than that.
LANE = 2 * 136


class DeviceArray:
    """`storage.HostArray` in device memory."""

    def __init__(self, shape, storage, values=None, misalign=0):
        self._shape, self._storage = shape, np.dtype(storage)
        self._before = 4 * GUARD + misalign * self._storage.itemsize
        self._end = self._before + int(np.prod(shape)) * self._storage.itemsize
        raw = np.full(self._end + GUARD, 0xFF, np.uint8)
        if values is not None:
            array = np.ascontiguousarray(values, storage)
            raw[self._before : self._end] = array.reshape(-1).view(np.uint8)
        self._bytes = torch.from_numpy(raw).cuda()
        torch.cuda.synchronize()  # the layer's own stream does not wait for PyTorch's

    @property
    def pointer(self):
        return self._bytes.data_ptr() + self._before

    def get(self):
        torch.cuda.synchronize()
        raw = self._bytes.cpu().numpy()
        return unguarded(raw, self._before, self._end, self._shape, self._storage)


class Workspace(DeviceArray):
    """Poisoned, but for the bytes that have to be zero before and after each call."""

    def __init__(self, size):
        self._zeros = library().gluon_syncbn_cuda_workspace_zeros()
        values = np.full(size, 0xFF, np.uint8)
        values[: self._zeros] = 0
        super().__init__((size,), np.uint8, values)

    def get(self):
        values = super().get()
        assert (values[: self._zeros] == 0).all(), "counters are not zero again"
        return values


class CudaDriver:
    """Kernels of the current GPU, on PyTorch's current stream."""

    device = "gpu(0)"
    lane = LANE
    array = DeviceArray

    def __init__(self):
        library().gluon_syncbn_cuda_workspace_zeros.restype = ctypes.c_int64

    def call(self, name, dtype, shape, workspace, **members):
        """Queues a kernel on a pass with these members; returns its status."""
        of = PASSES[name][0](dtype=DTYPES.get(dtype, dtype), layout=Layout(*shape))
        for key, value in members.items():
            setattr(of, key, getattr(value, "pointer", value))
        function = getattr(library(), f"gluon_syncbn_cuda_{name}")
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        scratch = ctypes.c_void_p(getattr(workspace, "pointer", None))
        return function(ctypes.byref(of), scratch, stream)

    def workspace_bytes(self, dtype, shape):
        function = library().gluon_syncbn_cuda_workspace_bytes
        function.restype = ctypes.c_int64
        of = MomentsPass(dtype=DTYPES[dtype], layout=Layout(*shape))
        size = function(ctypes.byref(of))
        assert size >= 0, last_error()
        return size

    def workspace(self, dtype, shape):
        return Workspace(self.workspace_bytes(dtype, shape))
