"""The devices of this machine, counted without touching them.

Called by users, before the first context is made.
"""

import subprocess
import sys

import mxnet as mx

# The driver itself counts, in a process of its own: it knows CUDA_VISIBLE_DEVICES and
# partitioned GPUs, and to ask it here would start CUDA in this process, which could no
# longer fork workers that use it.
_COUNT = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
assert driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
print(count.value)
"""


def available_contexts():
    """The contexts that a net can be made parallel over: all GPUs, else the CPU.

    Makes no context, allocates no device memory and does not start CUDA in this
    process. ``CUDA_VISIBLE_DEVICES`` counts.

    Returns
    -------
    list of mxnet.Context
        ``[gpu(0), gpu(1), ...]``, or ``[cpu(0)]`` where there is no GPU or MXNet was
        built without CUDA.

    Examples
    --------
    >>> from gluon_syncbn import available_contexts
    >>> contexts = available_contexts()
    """
    return [mx.gpu(k) for k in range(_num_gpus())] or [mx.cpu(0)]


def _num_gpus():
    if not mx.runtime.Features().is_enabled("CUDA"):
        return 0
    result = subprocess.run(
        [sys.executable, "-c", _COUNT], capture_output=True, text=True, check=False
    )
    # Without a driver, or without a device, the count fails.
    return int(result.stdout) if result.returncode == 0 else 0
