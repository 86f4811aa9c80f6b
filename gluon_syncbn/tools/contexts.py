"""The devices of this machine, counted without touching them.

It must not use CUDA itself.
"""

from __future__ import annotations

import subprocess
import sys

import mxnet as mx

# The driver counts, because it knows CUDA_VISIBLE_DEVICES and partitioned GPUs; in a
# separate process, because one that has started CUDA cannot fork workers that use it.
_PATIENCE = 60  # seconds; a driver that starts takes a few
_COUNT = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
assert driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
print(count.value)
"""


def available_contexts() -> list[mx.Context]:
    """The contexts that a net can be made parallel over: all GPUs, else the CPU.

    Makes no context, allocates no device memory and does not start CUDA in this
    process. ``CUDA_VISIBLE_DEVICES`` counts.

    Returns
    -------
    list of mxnet.Context
        ``[gpu(0), gpu(1), ...]``, or ``[cpu(0)]`` where there is no GPU or MXNet was
        built without CUDA.

    Raises
    ------
    RuntimeError
        If the driver does not answer within a minute.

    Examples
    --------
    >>> from gluon_syncbn import available_contexts
    >>> contexts = available_contexts()
    """
    return [mx.gpu(k) for k in range(_num_gpus())] or [mx.cpu(0)]


def _num_gpus():
    if not mx.runtime.Features().is_enabled("CUDA"):
        return 0
    command = [sys.executable, "-c", _COUNT]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"the CUDA driver did not count its GPUs within {_PATIENCE} s"
        ) from None
    # Without a driver, or without a device, the count fails.
    return int(result.stdout) if result.returncode == 0 else 0
