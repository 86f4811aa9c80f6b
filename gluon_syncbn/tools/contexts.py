"""The devices of this machine, counted without touching them."""

from __future__ import annotations

import subprocess
import sys

import mxnet as mx

# The driver knows CUDA_VISIBLE_DEVICES and partitioned GPUs. Another process asks it,
# because one that has started CUDA cannot fork workers that use it.
_SECONDS = 60
_COUNT = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
assert driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
print(count.value)
"""


def available_contexts() -> list[mx.Context]:
    """Return the contexts that a net can be made parallel over: all GPUs, else the CPU.

    Makes no context, allocates no device memory and does not start CUDA in this
    process. ``CUDA_VISIBLE_DEVICES`` counts.

    Returns
    -------
    list of mxnet.Context
        ``[gpu(0), gpu(1), ...]``, or ``[cpu(0)]`` where there is no GPU or MXNet was
        built without CUDA.

    Raises
    ------
    subprocess.TimeoutExpired
        If the driver does not answer within a minute.

    Examples
    --------
    >>> from gluon_syncbn import available_contexts
    >>> contexts = available_contexts()
    """
    if not mx.runtime.Features().is_enabled("CUDA"):
        return [mx.cpu(0)]
    command = [sys.executable, "-c", _COUNT]
    # The count fails without a driver, or without a device.
    found = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    count = int(found.stdout) if found.returncode == 0 else 0
    return [mx.gpu(k) for k in range(count)] or [mx.cpu(0)]
