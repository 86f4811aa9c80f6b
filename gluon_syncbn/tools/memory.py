"""Keeps memory that MXNet frees after every step in the process; called by users."""

from __future__ import annotations

from ..native import library


def keep_freed_memory() -> bool:
    """Makes this process keep the memory that its arrays on CPUs free.

    The layer does this in its first training step on a CPU, so that only steps before
    that one gain from a call. Outside static graphs (``hybridize(static_alloc=True)``)
    MXNet takes every array from the system and frees it in each step, and getting 30 MB
    in fresh pages takes longer than normalizing them. Pages that are kept serve the
    next step: all CPU operators of such nets get faster, not only this package's. The
    process stays at its largest size from then on, as it does on GPUs. Forked processes
    inherit the setting. Arrays of more than 64 MB that one of MXNet's threads allocates
    are still returned.

    It tells the C library (``mallopt``) to serve all sizes from heaps that never
    shrink. The environment variable ``GLUON_SYNCBN_KEEP_MEMORY=0`` refuses.

    Returns
    -------
    bool
        Whether freed memory is kept: False if the environment variable is 0, or with a
        C library other than glibc.

    Examples
    --------
    >>> import gluon_syncbn
    >>> kept = gluon_syncbn.keep_freed_memory()  # before the first step
    """
    return bool(library.load().gluon_syncbn_keep_freed_memory())
