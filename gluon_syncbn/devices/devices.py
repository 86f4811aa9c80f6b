"""Runs a function once per context, each time from that context's own thread.

It must not know what the function computes. docs/design/mxnet.md says why CPU contexts
need threads; these take turns, because MXNet's front end is not thread-safe, and
pushing work is quick.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..arguments import (
    check_callable,
    check_contexts,
    check_int,
    check_type,
    comma_list,
    pluralize,
)
from ..compat import Context
from ..mxnet_private.arrays import (
    array_of,
    draw_seed,
    set_seed,
    share_bounds,
    to_context,
    watch_seed,
)
from ..mxnet_private.graphs import DTYPES
from ..mxnet_private.parameters import data_of
from ..native import failures
from ..native.interrupts import ALL_WAIT, DeferredSignals
from ..native.library import load
from .workers import Workers

_LISTS = (Sequence, mx.nd.NDArray, np.ndarray)


class _Seeded(threading.local):
    seeds = -1  # calls of mx.random.seed when this context's thread got its own


_seeded = _Seeded()
_seeds = 0  # calls of mx.random.seed
_drawn = -1, 0  # their number at the latest draw from a caller's generator, and that


def _note_seed():
    global _seeds
    _seeds += not inside_map()


class Devices:
    """The contexts of one data-parallel net, driven one after the other.

    A context has one thread in a process, whoever calls it. Each thread has its own
    random generators, which the first `map` after ``mx.random.seed`` seeds, from the
    generator of its caller and differently for each context.

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
    >>> devices = Devices([mx.cpu(0), mx.cpu(1)])
    >>> shards = devices.split(mx.nd.arange(5))
    >>> sums = devices.map(lambda x: x.sum(), shards)
    >>> [float(s.asscalar()) for s in sums]
    [3.0, 7.0]
    """

    _workers = Workers()  # of all instances

    def __init__(self, contexts: Sequence[mx.Context]) -> None:
        self.contexts = check_contexts("contexts", contexts)
        watch_seed(_note_seed)
        gpus = [context for context in self.contexts if context.device_type == "gpu"]
        if gpus and not mx.runtime.Features().is_enabled("CUDA"):
            raise ValueError(
                f"contexts names {gpus[0]}, but this MXNet was built for CPUs alone: "
                "expected mx.cpu(0), mx.cpu(1), ..., or an MXNet for GPUs, such as "
                "`pip install mxnet-cu112==1.9.1`"
            )

    def __len__(self):
        return len(self.contexts)

    def __repr__(self):
        return f"Devices([{comma_list(self.contexts)}])"

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
                f"batch has {pluralize(rows, 'row')} along axis {batch_axis}, expected "
                f"at least one for each of the {pluralize(count, 'context')}. "
                "A net of make_parallel takes any number of rows."
            )
        return split(batch, self.contexts, batch_axis, share_bounds(rows, count))

    def map(self, function: Callable, *lists: Sequence) -> list:
        """Calls ``function(*elements)`` once per context, from the context's thread.

        The contexts are called one after the other, in order. The caller's ``autograd``
        recording and training flags and NumPy semantics hold in the calls, and the
        current context is the one that is called. A function must not wait for results
        that need the other contexts (``asnumpy``, ``wait_to_read``): those have no work
        yet. Wait in the caller, after `map`. Threads that call `map` take turns, those
        of other Devices too; a function may call `map` itself.

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
            If a list has another length.
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
                cure = ". A net of make_parallel takes batches with fewer rows."
                raise ValueError(
                    f"list {position} has {pluralize(length, 'element')}, expected one "
                    f"for each of the {pluralize(len(self), 'context')}"
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
        if len(lengths) > 1 or max(lengths, default=0) > len(self.contexts):
            raise ValueError(
                f"lists have lengths {comma_list(sorted(lengths))}, expected "
                f"equal ones, at most {len(self)}"
            )
        # In a nested call it is the turn of who called the outer one.
        is_nested = bool(failures.here.contexts)
        with DeferredSignals() as section:
            with nullcontext() if is_nested else self._turn(section):
                call = _under_flags(function, self.contexts, _caller_seed(is_nested))
                with self._giving_up(is_nested, section):
                    return [
                        section.wait(
                            1, self._workers.of(context).call, call, context, *elements
                        )
                        for context, *elements in zip(self.contexts, *lists)
                    ]

    @contextmanager
    def _turn(self, section):
        """In the ``with`` block no other thread of the process calls `map`."""
        turn, bound = failures.turn(), failures.bound()
        try:
            is_free = turn.acquire(False)
            if not (is_free or section.wait(0, turn.acquire, True, bound)):
                raise mx.MXNetError(
                    f"waited {failures.get_timeout():g} s for the map of another thread"
                )
            # Calls of a map that was interrupted may still run.
            section.wait(0, self._workers.finish, bound)
            failures.check_thread()
            yield
        finally:
            with suppress(RuntimeError):  # this thread has not got its turn
                turn.release()

    @contextmanager
    def _giving_up(self, is_nested, section):
        """Gives up the work in flight if the ``with`` block raises."""
        try:
            yield
        except BaseException as error:
            reason = (
                "given up because a call for another context raised "
                f"{type(error).__name__}: {error}"
            )
            failures.end_waits(reason)
            if not is_nested:
                # After a KeyboardInterrupt a thread may be at work still, and MXNet
                # crashes if two threads call it at once.
                section.wait(0, self._workers.finish, failures.bound())
            failures.give_up(reason)
            raise


class ContextOfLoop(Devices):
    """One context of a plain loop, with a thread of its own.

    Loops of several training threads may come to the contexts in different orders. In
    one thread a context's operators share memory, so each loop would wait for the other
    one's.
    """

    def __init__(self, context: mx.Context) -> None:
        super().__init__([context])
        self._workers = Workers()


def check_array(batch: Any) -> None:
    """TypeError unless MXNet can take a batch as a dense array."""
    types = mx.nd.NDArray, np.ndarray
    check_type("batch", batch, types, "an NDArray or NumPy array")
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
        has_length = getattr(elements, "shape", None) != ()
        if not (has_length and isinstance(elements, _LISTS)):
            check_type(f"list {position}", elements, (), expected)
    return list(map(len, lists))


def inside_map(contexts: Sequence[mx.Context] = ()) -> bool:
    """Tells whether the calling function is one that `map` calls.

    With contexts: one that the innermost `map` calls on just these.
    """
    mapped = failures.here.contexts
    return bool(mapped) and (not contexts or list(contexts) == list(mapped))


def split(
    batch: mx.nd.NDArray | np.ndarray,
    contexts: Sequence[mx.Context],
    batch_axis: int,
    bounds: Sequence[tuple[int, int]],
) -> list[mx.nd.NDArray]:
    """The rows (begin, end) of a batch on each of `contexts`, as `bounds` says."""
    shards, index = [], [slice(None)] * batch.ndim
    is_recording = autograd.set_recording(False)
    try:
        for context, (begin, end) in zip(contexts, bounds):
            index[batch_axis] = slice(begin, end)
            shard = batch[tuple(index)]
            if isinstance(shard, mx.nd.NDArray):
                shards.append(to_context(shard, context))
            else:
                shards.append(array_of(shard, context))
    finally:
        autograd.set_recording(is_recording)
    return shards


@contextmanager
def restricted(
    layers: Sequence, contexts: Sequence[mx.Context], copies_statistics: bool = False
) -> Iterator[None]:
    """Let SyncBatchNorm layers wait for these contexts only, in training.

    For a batch with fewer rows than contexts. With `copies_statistics` the other
    contexts get the running statistics of the first one at the end. Backward may follow
    later: it waits for the contexts of its forward call.

    Waits for all pending work at the beginning and at the end, because a device that is
    still busy with an earlier step belongs to the devices of that step.
    """
    # An exception of a handler would come between two layers, or before the first line
    # of __exit__. A second Ctrl-C reaches the block, and the first one its maps.
    with DeferredSignals() as section:
        try:
            mx.nd.waitall()
            for layer in layers:
                _set_participants(layer, contexts)
            section.limits = 1, math.inf
            yield
        finally:
            section.limits = ALL_WAIT
            try:
                mx.nd.waitall()
            finally:
                # After a failure too: other layers may have finished their step.
                for layer in layers:
                    _set_participants(layer, [])
                    if copies_statistics:
                        _copy_running_statistics(layer, contexts)


def _set_participants(layer, contexts):
    load().gluon_syncbn_set_participants(layer.key, " ".join(map(str, contexts)))


def _copy_running_statistics(layer, contexts):
    """Copy the first context's running statistics to all but `contexts`."""
    for parameter in (layer.running_mean, layer.running_var):
        for data in data_of(parameter):  # none, if the net has no shapes yet
            if data.context not in contexts:
                with autograd.pause():
                    parameter.data(contexts[0]).copyto(data)


def _caller_seed(is_nested):
    """Return the number of seeds, and what the latest leads to in a caller's thread."""
    global _drawn
    # Only then: a draw waits for the generator, and work may use it that waits for us.
    if _drawn[0] != _seeds and not is_nested:
        _drawn = _seeds, draw_seed()
    return _drawn


def _seed_thread(context, number, value):
    if _seeded.seeds != number:
        _seeded.seeds = number
        set_seed(zlib.crc32(f"{value} {context}".encode()) >> 1, ctx=context)


def _under_flags(function, contexts, seed):
    """`function` for other threads, under the thread-local state of this one."""
    record = autograd.record if autograd.is_recording() else autograd.pause
    is_training = autograd.is_training()
    np_shape, np_array = mx.util.is_np_shape(), mx.util.is_np_array()

    def call(context, *elements):
        former, failures.here.contexts = failures.here.contexts, contexts
        try:
            _seed_thread(context, *seed)
            # A copy of the context, because it notes the one that it replaces.
            with Context(context), record(train_mode=is_training):
                with mx.util.np_shape(np_shape), mx.util.np_array(np_array):
                    return function(*elements)
        finally:
            failures.here.contexts = former

    return call
