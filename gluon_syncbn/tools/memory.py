"""Keeps memory that MXNet frees after every step in the process.

Called by users, once, before the first step.
"""

from __future__ import annotations

import ctypes

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Makes this process keep the memory that its arrays on CPUs free.

    Outside static graphs (``hybridize(static_alloc=True)``) MXNet takes every array
    from the system and frees it in each step, and getting 30 MB in fresh pages takes
    longer than normalizing them. Pages that are kept serve the next step: all CPU
    operators of such nets get faster, not only this package's. The process stays at its
    largest size from then on, as it does on GPUs. Forked processes inherit the setting.

    It tells the C library (``mallopt``) to serve all sizes from one heap, and not to
    shrink that. Call it early: threads that already have a separate heap keep it.

    Returns
    -------
    bool
        Whether the C library could be told so; False for others than glibc.

    Examples
    --------
    >>> import gluon_syncbn
    >>> kept = gluon_syncbn.keep_freed_memory()  # before the first step
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1}
    return all([mallopt(name, value) == 1 for name, value in settings.items()])
