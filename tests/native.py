"""The shared library without MXNet: kernels and the layer on one device through C.

Called by tests of the CPU and of GPUs, and by scripts/benchmark_gpu.py. Memory comes
from a driver: `array(shape, storage, values, misalign)` gives an object with `pointer`
and `get()`; `stream` is a CUDA stream or None.
"""

import ctypes
import functools
import os
from collections import namedtuple
from pathlib import Path

import numpy as np
from storage import DTYPES, HostArray

ROOT = Path(__file__).resolve().parents[1]
SHAPE = object()  # stands for (outer, channels, inner) among a kernel's arguments


@functools.lru_cache(maxsize=None)
def library():
    default = ROOT / "gluon_syncbn" / "libgluon_syncbn.so"
    loaded = ctypes.CDLL(os.environ.get("GLUON_SYNCBN_LIBRARY", str(default)))
    for name in "last_error", "cuda_architectures":
        getattr(loaded, f"gluon_syncbn_{name}").restype = ctypes.c_char_p
    loaded.gluon_syncbn_op_create.restype = ctypes.c_void_p
    return loaded


def last_error():
    return library().gluon_syncbn_last_error().decode()


def converted(argument, shape):
    if argument is SHAPE:
        return [ctypes.c_int64(n) for n in shape]
    if hasattr(argument, "pointer"):
        return [ctypes.c_void_p(argument.pointer)]
    return [argument]


class Activation(namedtuple("Activation", "function slope from_output")):
    """What is fused into a layer, see `reference.activate`, and what backward reads."""

    def arguments(self):
        number = {"identity": 0, "leaky_relu": 1, "relu": 1, "elu": 2}[self.function]
        return number, ctypes.c_double(self.slope), int(self.from_output)


NONE = Activation("identity", 0.0, False)
ACTIVATIONS = [
    Activation("relu", 0.0, False),
    Activation("elu", 0.7, False),
    Activation("leaky_relu", 0.01, True),
    Activation("leaky_relu", 3.0, False),
    Activation("identity", 0.0, True),
]


class CpuDriver:
    """Kernels of the CPU on NumPy's memory."""

    lane = 0  # all sums are float64
    array = HostArray

    def call(self, name, dtype, shape, *arguments):
        """Calls a kernel; returns its status."""
        function = getattr(library(), f"gluon_syncbn_cpu_{name}")
        arguments = [c for argument in arguments for c in converted(argument, shape)]
        return function(ctypes.c_int(DTYPES.get(dtype, dtype)), *arguments)

    def workspace(self, dtype, shape):
        function = library().gluon_syncbn_cpu_workspace_bytes
        function.restype = ctypes.c_int64
        return HostArray((function(*converted(SHAPE, shape)),), np.uint8)


class Shard(ctypes.Structure):
    """gluon_syncbn_shard of src/op/c_api.h."""

    _fields_ = [
        ("dtype", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("x", "gamma", "beta")),
        *((name, ctypes.c_void_p) for name in ("running_mean", "running_var")),
        ("y_request", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("y", "dy")),
        *((name, ctypes.c_int) for name in ("dx_request", "dgamma_request")),
        ("dbeta_request", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("dx", "dgamma", "dbeta")),
    ]


class Layer:
    """The layer on one device: src/op/c_api.h.

    `device` is its name in the exchange, `computes_on` where its memory is.
    """

    def __init__(
        self,
        group,
        device,
        computes_on,
        num_devices,
        axis=1,
        eps=1e-5,
        momentum=0.9,
        timeout=20.0,
        activation=NONE,
    ):
        names = (name.encode() for name in (group, device, computes_on))
        numbers = map(ctypes.c_double, (eps, momentum, timeout))
        create = library().gluon_syncbn_op_create
        self._op = create(*names, num_devices, axis, *numbers, *activation.arguments())
        if not self._op:
            raise RuntimeError(last_error())

    def close(self):
        library().gluon_syncbn_op_delete(ctypes.c_void_p(self._op))

    def forward(self, training, dtype, shape, **members):
        self._run("forward", dtype, shape, members, int(training))

    def backward(self, dtype, shape, **members):
        self._run("backward", dtype, shape, members)

    def _run(self, name, dtype, shape, members, *arguments):
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        shard = Shard(dtype=DTYPES[dtype], ndim=len(shape), shape=sizes)
        for key, value in members.items():
            setattr(shard, key, getattr(value, "pointer", value))
        function = getattr(library(), f"gluon_syncbn_op_{name}")
        if function(ctypes.c_void_p(self._op), *arguments, ctypes.byref(shard)) != 0:
            raise RuntimeError(last_error())
