"""Call a function once for each context, each time in the thread of that context.

docs/design/mxnet.md explains why CPU contexts need threads. The threads take turns,
because MXNet's front end is not thread-safe and queueing work is quick.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..arguments import (
    check_contexts,
    check_int,
    check_type,
    comma_list,
    pluralize,
    short_repr,
)
from ..compat import Context
from ..native import failures
from ..native.timeouts import get_timeout
from ..native.turns import here, turn
from .shards import check_array, number_of_rows, share_bounds, split_rows
from .workers import Workers

# ---- Seeds. Each thread has random generators of its own.


class _Thread(threading.local):
    seed_count = -1  # `_seed_count` when the thread was seeded


_thread = _Thread()
_set_seed = mx.random.seed  # it sets the seed of the calling thread only
_seed_count = 0  # calls of mx.random.seed outside of maps
_latest_draw = -1, 0  # `_seed_count` at the latest draw, and the drawn seed


@lru_cache(maxsize=None)
def _watch_seed():
    """Count later calls of mx.random.seed."""

    @wraps(_set_seed)
    def counted(*args, **kwargs):
        global _seed_count
        _set_seed(*args, **kwargs)
        _seed_count += not inside_map()

    mx.random.seed = counted


def _draw_seed():
    """Return a seed from the calling thread's generator, which the draw advances."""
    with autograd.pause(), mx.util.np_array(False):
        value = mx.nd.random.randint(0, 2**31 - 1, (1,), ctx=mx.cpu(), dtype="int32")
    return int(value.asscalar())


# ---- Devices.


class Devices:
    """The contexts of one data-parallel net, with a thread for each.

    Several `Devices` of a process share the thread of a context. Each thread has its
    own random generators. The first `map` after ``mx.random.seed`` seeds them from the
    caller's generator, differently for each context.

    Parameters
    ----------
    contexts : list of mxnet.Context
        Distinct contexts, for example ``[mx.cpu(0), mx.cpu(1)]``.

    Raises
    ------
    ValueError
        If the list is empty, contains a context twice, or contains a GPU although MXNet
        was built without CUDA.
    TypeError
        If an element is not a context.

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

    _workers = Workers()  # shared by all instances

    def __init__(self, contexts: Sequence[mx.Context]) -> None:
        self.contexts = check_contexts("contexts", contexts)
        _watch_seed()

    def __len__(self):
        return len(self.contexts)

    def __repr__(self):
        return f"Devices([{comma_list(self.contexts)}])"

    def split(
        self, batch: mx.nd.NDArray | np.ndarray, batch_axis: int = 0
    ) -> list[mx.nd.NDArray]:
        """Return each context's shard of a batch.

        ``autograd`` never records the split, so attach gradients to the shards.

        Parameters
        ----------
        batch : NDArray or numpy.ndarray
            An array with at least one row for each context along `batch_axis`. The
            dtype is kept.
        batch_axis : int, default 0
            The axis to split.

        Returns
        -------
        list of NDArray
            One shard per context, in order and on that context. If the rows cannot be
            shared evenly, the first contexts get one row more.

        Raises
        ------
        ValueError
            If there are fewer rows than contexts, or no such axis.
        TypeError
            If `batch` is sparse or not an array, if MXNet has no such dtype, or if
            `batch_axis` is not an int.
        """
        check_int("batch_axis", batch_axis)
        check_array(batch)
        rows, count = number_of_rows([batch], batch_axis), len(self)
        if rows < count:
            raise ValueError(
                f"batch must have at least one row for each of the "
                f"{pluralize(count, 'context')} along axis {batch_axis}, got "
                f"{pluralize(rows, 'row')}. A net of make_parallel takes any number of "
                "rows."
            )
        return split_rows(batch, self.contexts, batch_axis, share_bounds(rows, count))

    def map(self, function: Callable, *lists: Sequence) -> list:
        """Call ``function(*elements)`` once per context, in the context's thread.

        The calls run one after the other, in the order of the contexts. They have the
        caller's ``autograd`` flags and NumPy semantics, and their own context is the
        current one. `function` must not wait for results that need the other contexts
        (``asnumpy``, ``wait_to_read``), because they may have no work yet. Wait after
        `map` instead. Threads that call `map` take turns, also with different Devices.
        `function` may call `map` itself.

        Parameters
        ----------
        function : callable
            It gets one element of each list as positional arguments.
        *lists : list
            Lists with one element per context.

        Returns
        -------
        list
            The results, one per context.

        Raises
        ------
        ValueError
            If a list has another length.
        TypeError
            If `function` is not callable, or a list is not a list.
        mxnet.MXNetError
            If a layer has failed and :func:`gluon_syncbn.recover` was not called since.
            If another thread has called `recover` and so cancelled this thread's
            pending work. If this thread waits longer than
            :func:`gluon_syncbn.get_timeout` for another thread's `map` or `recover`.
        Exception
            Any exception of `function`, with its traceback. Later contexts are not
            called, and pending work is cancelled as by :func:`gluon_syncbn.recover`.
        KeyboardInterrupt
            After Ctrl-C, once every context has been called, so that no context is left
            without its work. A second Ctrl-C interrupts at once, like an exception of
            `function`.
        """
        lengths = _lengths(lists)
        if lengths - {len(self)}:
            raise ValueError(
                "lists must have one element for each of the "
                f"{pluralize(len(self), 'context')}, got lengths "
                f"{comma_list(sorted(lengths))}. A net of make_parallel takes batches "
                "with fewer rows."
            )
        check_type("function", function, Callable, "a function")
        return self.map_first(function, *lists)

    def map_first(
        self, function: Callable, *lists: Sequence, tell_ranks: bool = True
    ) -> list:
        """Call a function as :meth:`map` does, for the first contexts only.

        If `tell_ranks`, an exception also ends the training of other processes. An
        exception in a prediction need not, because they do not wait for it.

        The lists have as many elements as there are contexts to call.
        """
        is_nested = bool(here.contexts)
        with turn() as (section, has_turn):
            if not has_turn:
                raise mx.MXNetError(
                    f"waited {get_timeout():g} s for the map of another thread"
                )
            # The first argument of `wait` is how many presses of Ctrl-C it defers.
            if not is_nested:
                if self._workers.are_busy():  # an interrupted map left calls
                    section.wait(0, self._workers.finish)
                failures.raise_pending()
            call = _with_callers_state(function, self.contexts)
            try:
                results = []
                for context, *elements in zip(self.contexts, *lists):
                    worker = self._workers.worker_for(context)
                    arguments = call, context, *elements
                    results.append(section.wait(1, worker.call, *arguments))
                return results
            except BaseException as error:
                reason = (
                    "cancelled because a call for another context raised "
                    f"{type(error).__name__}: {error}"
                )
                failures.end_waits(reason, tell_ranks)
                if not is_nested:
                    # A KeyboardInterrupt may leave a thread at work, and MXNet crashes
                    # if two threads call it at once.
                    section.wait(0, self._workers.finish)
                failures.give_up(reason)
                raise


class OwnThreads(Devices):
    """Devices that share no thread with other Devices.

    Operators that were queued by one thread may have to wait for each other in MXNet.
    So two training loops that shared threads could wait for each other.
    """

    def __init__(self, contexts: Sequence[mx.Context]) -> None:
        super().__init__(contexts)
        self._workers = Workers()


def inside_map(contexts: Sequence[mx.Context] = ()) -> bool:
    """Return True inside a `map`; if `contexts` are given, only in a map over them."""
    mapped = here.contexts
    return bool(mapped) and (not contexts or list(contexts) == list(mapped))


def _lengths(lists):
    for position, elements in enumerate(lists):
        if not isinstance(elements, (Sequence, mx.nd.NDArray, np.ndarray)):
            raise TypeError(
                f"list {position} must be a list with an element for each context, got "
                f"{short_repr(elements)}"
            )
    return set(map(len, lists))


def _with_callers_state(function, contexts):
    """Return `function` with the caller's flags and seed, to call in other threads."""
    global _latest_draw
    # A draw waits for queued work, which in a map may wait for another context's call.
    if _latest_draw[0] != _seed_count and not here.contexts:
        _latest_draw = _seed_count, _draw_seed()
    seed_count, seed = _latest_draw
    is_recording, is_training = autograd.is_recording(), autograd.is_training()
    np_shape, np_array = mx.util.is_np_shape(), mx.util.is_np_array()

    def call(context, *elements):
        previous, here.contexts = here.contexts, contexts
        flags = autograd.set_recording(is_recording), autograd.set_training(is_training)
        try:
            if _thread.seed_count != seed_count:
                _thread.seed_count = seed_count
                _set_seed(zlib.crc32(f"{seed} {context}".encode()) >> 1, ctx=context)
            # A copy, because `with` stores the replaced context in the object itself.
            with Context(context), mx.util.np_shape(np_shape):
                with mx.util.np_array(np_array):
                    return function(*elements)
        finally:
            here.contexts = previous
            autograd.set_recording(flags[0])
            autograd.set_training(flags[1])

    return call
