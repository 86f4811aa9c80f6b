"""Find the contexts of this machine."""

from __future__ import annotations

import subprocess
import sys

import mxnet as mx

# A child process counts the GPUs, because counting starts CUDA, and a process that is
# forked after CUDA has started, such as a worker of a DataLoader, cannot use CUDA.
_COUNT_GPUS = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
    raise SystemExit(1)
print(count.value)
"""


def available_contexts() -> list[mx.Context]:
    """Return the contexts of all GPUs, or the CPU, for :func:`make_parallel`.

    It creates no CUDA context, allocates no device memory and does not start CUDA in
    this process. It respects ``CUDA_VISIBLE_DEVICES``.

    Returns
    -------
    list of mxnet.Context
        ``[gpu(0), gpu(1), ...]``, or ``[cpu(0)]`` if there is no GPU or MXNet was built
        without CUDA.

    Examples
    --------
    >>> from gluon_syncbn import available_contexts
    >>> contexts = available_contexts()
    """
    if not mx.runtime.Features().is_enabled("CUDA"):
        return [mx.cpu(0)]
    command = [sys.executable, "-c", _COUNT_GPUS]
    # The child fails if there is no driver or no device.
    found = subprocess.run(command, capture_output=True, timeout=60, check=False)
    count = int(found.stdout) if found.returncode == 0 else 0
    return [mx.gpu(k) for k in range(count)] or [mx.cpu(0)]
