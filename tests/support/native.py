"""The shared library without MXNet: the layer on one device through C.

Called by tests/gpu. Memory is a driver's: `array(shape, storage, values)` makes an
object with `pointer` and `get()`.
"""

import ctypes
import functools
import os
from collections import namedtuple
from pathlib import Path

from support.storage import DTYPES, HostArray

ROOT = Path(__file__).resolve().parents[2]


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


class Activation(namedtuple("Activation", "function slope from_output")):
    """A layer's activation, see `reference.activate`, and whether backward reads y."""

    def arguments(self):
        number = {"identity": 0, "leaky_relu": 1, "relu": 1, "elu": 2}[self.function]
        return number, self.slope, int(self.from_output)


NONE = Activation("identity", 0.0, False)
ACTIVATIONS = [
    Activation("relu", 0.0, False),
    Activation("elu", 0.7, False),
    Activation("leaky_relu", 0.01, True),
    Activation("leaky_relu", 3.0, False),
    Activation("identity", 0.0, True),
]


class CpuDriver:
    """The CPU and NumPy's memory."""

    device = "cpu(0)"
    lane = 0  # all sums are float64
    array = HostArray


class Settings(ctypes.Structure):
    """gluon_syncbn_settings of src/c_api/op_for_tests.cc."""

    _fields_ = [
        *((name, ctypes.c_char_p) for name in ("group", "device", "computes_on")),
        *((name, ctypes.c_int) for name in ("num_devices", "axis")),
        *((name, ctypes.c_double) for name in ("epsilon", "momentum", "timeout")),
        *(("function", ctypes.c_int), ("slope", ctypes.c_double)),
        ("from_output", ctypes.c_int),
    ]


class Shard(ctypes.Structure):
    """gluon_syncbn_shard of src/c_api/op_for_tests.cc."""

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
    """The layer on one device: src/c_api/op_for_tests.cc.

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
        numbers = num_devices, axis, eps, momentum, timeout
        settings = Settings(*names, *numbers, *activation.arguments())
        self._op = library().gluon_syncbn_op_create(ctypes.byref(settings))
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
