"""Runs a function once per context, each time from that context's own thread.

It must not know what the function computes. docs/design/mxnet.md says why CPU contexts
need threads; these take turns, because MXNet's front end is not thread-safe, and
pushing work is quick.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..common.arguments import (
    check_callable,
    check_contexts,
    check_int,
    check_type,
    counted,
    listed,
)
from ..common.shares import share_bounds
from ..mxnet_private.graphs import DTYPES
from ..native import failures
from ..native.interrupts import deferred_interrupt
from . import workers

_LISTS = (Sequence, mx.nd.NDArray, np.ndarray)
_within = threading.local()  # the Devices whose functions a thread is called in


class Devices:
    """The contexts of one data-parallel net, driven one after the other.

    Parameters
    ----------
    contexts : list of mxnet.Context
        Distinct contexts, for example ``[mx.cpu(0), mx.cpu(1)]``.

    Raises
    ------
    ValueError
        If the list is empty, names a context twice, or names a GPU where MXNet was
        built for CPUs.
    TypeError
        If an element is no context.

    Examples
    --------
    >>> from gluon_syncbn import Devices
    >>> import mxnet as mx
    >>> with Devices([mx.cpu(0), mx.cpu(1)]) as devices:
    ...     shards = devices.split(mx.nd.arange(5))
    ...     sums = devices.map(lambda x: x.sum(), shards)
    >>> [float(s.asscalar()) for s in sums]
    [3.0, 7.0]
    """

    def __init__(self, contexts: Sequence[mx.Context]) -> None:
        self.contexts = check_contexts("contexts", contexts)
        gpus = [context for context in self.contexts if context.device_type == "gpu"]
        if gpus and not mx.runtime.Features().is_enabled("CUDA"):
            raise ValueError(
                f"contexts names {gpus[0]}, but this MXNet was built for CPUs alone: "
                "expected mx.cpu(0), mx.cpu(1), ..., or an MXNet for GPUs, such as "
                "`pip install mxnet-cu112==1.9.1`"
            )
        self._turn, self._process = threading.Lock(), os.getpid()
        # The thread of the latest map, and the number of recoveries until then.
        self._latest = None, 0
        names = [f"gluon_syncbn-{context}" for context in self.contexts]
        self._workers: Any = list(map(workers.hire, names))  # None once closed
        self._finalizer = weakref.finalize(self, workers.let_go, self._workers)
        self._finalizer.atexit = False

    def __len__(self):
        return len(self.contexts)

    def __reduce__(self):  # a copy gets other threads
        return Devices, (self.contexts,)

    def __repr__(self):
        return f"Devices([{listed(self.contexts)}])"

    def split(
        self, batch: mx.nd.NDArray | np.ndarray, batch_axis: int = 0
    ) -> list[mx.nd.NDArray]:
        """Gives each context its shard of a batch.

        Never recorded by ``autograd``: the shards' graphs must not share a node, which
        the first shard's backward would free. Attach gradients to the shards.

        Parameters
        ----------
        batch : NDArray or numpy.ndarray
            At least as many rows along `batch_axis` as there are contexts. The dtype is
            kept.
        batch_axis : int, default 0
            The axis that is split.

        Returns
        -------
        list of NDArray
            One shard per context, in order and on that context. Where the rows cannot
            be shared evenly, the first contexts get one row more.

        Raises
        ------
        ValueError
            If there are fewer rows than contexts, or no such axis.
        TypeError
            If `batch` is no array, is sparse, or has a dtype that MXNet has not; or
            `batch_axis` is no int.
        """
        check_int("batch_axis", batch_axis)
        check_array(batch)
        if not -batch.ndim <= batch_axis < batch.ndim:
            raise ValueError(
                f"batch_axis is {batch_axis}, but batch has shape {batch.shape}"
            )
        rows, count = batch.shape[batch_axis], len(self)
        if rows < count:
            raise ValueError(
                f"batch has {counted(rows, 'row')} along axis {batch_axis}, expected "
                f"at least one for each of the {counted(count, 'context')}; "
                "make_parallel takes any number, and participating names the contexts "
                "that have a row"
            )
        return split(batch, self.contexts, batch_axis)

    def map(self, function: Callable, *lists: Sequence) -> list:
        """Calls ``function(*elements)`` once per context, from the context's thread.

        The contexts are called one after the other, in order. The caller's ``autograd``
        recording and training flags and NumPy semantics hold in the calls, and the
        current context is the one that is called. A function must not wait for results
        that need the other contexts (``asnumpy``, ``wait_to_read``): those have no work
        yet. Wait in the caller, after `map`. Threads that call `map` take turns.

        Parameters
        ----------
        function : callable
        *lists : list
            Each has one element per context, given as positional arguments.

        Returns
        -------
        list
            The results, one per context.

        Raises
        ------
        ValueError
            If a list has another length, or `close` was called.
        RuntimeError
            If it is called inside of a function that these Devices call (those of
            another one may be nested); if a function still runs whose `map` was
            interrupted; if these Devices are those of a parent process.
        mxnet.MXNetError
            If a layer has failed, until :func:`gluon_syncbn.recover`. If another thread
            has recovered since this one's latest call, which gave up what was in
            flight. If another thread's `map` does not end within
            :func:`gluon_syncbn.get_timeout`.
        Exception
            Whatever `function` raises, with its traceback. Contexts after that one are
            not called, and work in flight is given up as by
            :func:`gluon_syncbn.recover`.
        KeyboardInterrupt
            After Ctrl-C, once every context has been called, so that none is left
            without its work; a second Ctrl-C raises at once, like an exception of
            `function`.
        """
        for position, length in enumerate(_lengths(lists)):
            if length != len(self):
                cure = (
                    "; make_parallel takes batches with fewer rows than contexts, and "
                    "participating names contexts that have a shard"
                )
                raise ValueError(
                    f"list {position} has {counted(length, 'element')}, expected one "
                    f"for each of the {counted(len(self), 'context')}"
                    f"{cure if length < len(self) else ''}"
                )
        return self.map_first(function, *lists)

    def map_first(self, function: Callable, *lists: Sequence) -> list:
        """As :meth:`map`, for the first contexts: as many as lists have elements.

        Raises
        ------
        ValueError
            If lists differ in length, or have more elements than there are contexts.
        """
        check_callable("function", function)
        lengths = set(_lengths(lists))
        if len(lengths) > 1 or max(lengths, default=0) > len(self):
            raise ValueError(
                f"lists have lengths {listed(sorted(lengths))}, expected "
                f"equal ones, at most {len(self)}"
            )
        with self._its_turn(), deferred_interrupt():
            self._check_failures()
            results, call = [], _under_flags(function)
            try:
                for worker, *arguments in zip(self._workers, self.contexts, *lists):
                    results.append(worker.submit(call, *arguments).result())
            except BaseException as error:
                self._give_up(
                    f"given up because a call for another context raised "
                    f"{type(error).__name__}: {error}"
                )
                raise
            return results

    @contextmanager
    def _its_turn(self):
        """The calling thread is the only one that calls in the ``with`` block."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{self} were made in a parent process: worker threads do not survive "
                "fork(), so make new ones here"
            )
        within = getattr(_within, "devices", ())
        if self in within:
            raise RuntimeError(
                f"map was called inside of a function that {self} call themselves: "
                "their threads are busy with that function, so it could only hang"
            )
        if not self._turn.acquire(timeout=_bound()):
            raise mx.MXNetError(
                f"waited {failures.get_timeout():g} s for the map of another thread on "
                f"{self}"
            )
        try:
            self._check_ready()
            _within.devices = (*within, self)
            yield
        finally:
            _within.devices = within
            self._turn.release()

    def _check_ready(self):
        if self._workers is None:
            raise ValueError("map was called on closed Devices")
        for context, worker in zip(self.contexts, self._workers):
            if worker.pending():
                raise RuntimeError(
                    f"the function that map called for {context}, and that was "
                    "interrupted, still runs: wait for its end, or make new Devices"
                )

    def _check_failures(self):
        failure = failures.failure()
        if failure:
            raise mx.MXNetError(failure)
        thread, seen = self._latest
        number, by, reason = failures.latest_recovery
        self._latest = threading.get_ident(), number
        if number != seen and self._latest[0] == thread != by:
            raise mx.MXNetError(
                f"what {self} had in flight was given up by another thread, which "
                f"called gluon_syncbn.recover ({reason}); its results are undefined"
            )

    def _give_up(self, reason):
        failures.end_waits(reason)
        # After a KeyboardInterrupt a thread may be at work still, and MXNet crashes if
        # two threads call it at once.
        wait(sum((worker.pending() for worker in self._workers), []), _bound())
        failures.give_up(reason)

    def close(self) -> None:
        """Releases the threads for other Devices. Closing twice is allowed."""
        self._finalizer()
        self._workers = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def check_array(batch: Any) -> None:
    """TypeError unless MXNet can take a batch as a dense array."""
    kinds = mx.nd.NDArray, np.ndarray
    check_type("batch", batch, kinds, "an NDArray or NumPy array")
    if isinstance(batch, mx.nd.sparse.BaseSparseNDArray):
        raise TypeError(f"batch is a dense array, but got a {batch.stype} one")
    if isinstance(batch, np.ndarray) and batch.dtype.type not in DTYPES:
        raise TypeError(
            f"batch has a dtype of MXNet ({', '.join(sorted(DTYPES.values()))}), but "
            f"got the dtype {batch.dtype}"
        )


def _lengths(lists):
    """The length of each list; TypeError for what has none."""
    expected = "a list with an element for each context"
    for position, elements in enumerate(lists):
        # An array without axes has no length.
        kinds = () if getattr(elements, "shape", None) == () else _LISTS
        check_type(f"list {position}", elements, kinds, expected)
    return list(map(len, lists))


def inside_map() -> bool:
    """Tells whether the calling function runs inside of a `map` of any Devices."""
    return bool(getattr(_within, "devices", ()))


def split(
    batch: mx.nd.NDArray | np.ndarray, contexts: Sequence[mx.Context], batch_axis: int
) -> list[mx.nd.NDArray]:
    """The shards of :meth:`Devices.split`, one for each of `contexts`."""
    shards, index = [], [slice(None)] * batch.ndim
    bounds = share_bounds(batch.shape[batch_axis], len(contexts))
    with autograd.pause():
        for context, (begin, end) in zip(contexts, bounds):
            index[batch_axis] = slice(begin, end)
            shard = batch[tuple(index)]
            if isinstance(shard, mx.nd.NDArray):
                shards.append(shard.as_in_context(context))
            else:
                shards.append(mx.nd.array(shard, ctx=context, dtype=shard.dtype))
    return shards


def _under_flags(function):
    """`function` for other threads, under the thread-local state of this one."""
    record = autograd.record if autograd.is_recording() else autograd.pause
    is_training, devices = autograd.is_training(), _within.devices
    np_shape, np_array = mx.util.is_np_shape(), mx.util.is_np_array()

    def call(context, *elements):
        _within.devices = devices
        try:
            # A copy of the context, because it notes the one that it replaces.
            with mx.Context(context), record(train_mode=is_training):
                with mx.util.np_shape(np_shape), mx.util.np_array(np_array):
                    return function(*elements)
        finally:
            del _within.devices

    return call


def _bound():
    """The timeout in seconds, as Python's locks take it."""
    return min(failures.get_timeout(), threading.TIMEOUT_MAX)
