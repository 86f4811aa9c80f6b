"""Skips this folder, with the reason, where there is no GPU to check.

Run it by `bash scripts/check_gpu.sh`, which keeps pytest from loading the conftest.py
above this one: that needs MXNet.
"""

import importlib.util

import pytest

collect_ignore = ["cuda_driver.py"]  # by --doctest-modules: it needs PyTorch


def missing():
    """Why nothing can be checked here; empty if it can."""
    if importlib.util.find_spec("torch") is None:
        return "needs PyTorch, for memory and as reference"
    import torch

    if not torch.cuda.is_available():
        return "needs a CUDA device"
    from support import native

    if not native.library().gluon_syncbn_cuda_architectures():
        return "the library was built without CUDA"
    return ""


@pytest.fixture(scope="session")
def driver():
    """Memory and kernels of the GPU; skips the test where there is none."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    from cuda_driver import CudaDriver

    return CudaDriver()
