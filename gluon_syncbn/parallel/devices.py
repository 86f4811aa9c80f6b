"""Runs a function once per context, each time from that context's own thread.

It must not know what the function computes. docs/design/mxnet.md says why CPU contexts
need threads; these take turns, because MXNet's front end is not thread-safe, and
pushing work is quick.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..common.arguments import (
    check_callable,
    check_contexts,
    check_int,
    check_type,
    comma_list,
    pluralize,
)
from ..common.mxnet_version import Context
from ..common.shares import share_bounds
from ..mxnet_private import seeds
from ..native import failures
from ..native.interrupts import DeferredSignals
from .shards import check_array, split


class Workers:
    """The workers of contexts; those of a parent process are not a fork's child's."""

    def __init__(self) -> None:
        self._workers: dict = {}

    def of(self, context: mx.Context) -> Worker:
        """The worker of a context."""
        key = os.getpid(), context
        if key not in self._workers:
            self._workers[key] = Worker(f"gluon_syncbn-{context}")
        return self._workers[key]

    def finish(self, timeout: float) -> None:
        """Waits for calls whose caller was interrupted.

        A thread whose call does not end is not used again; it ends after that call.
        """
        for key, worker in list(self._workers.items()):
            if key[0] == os.getpid() and not worker.is_idle(timeout):
                del self._workers[key]


class _Own(threading.local):
    calls: Any = None  # the queue of the worker whose thread this is


_own = _Own()


class Worker:
    """A thread that makes the calls it is given, in order, while this object lives.

    A daemon: a call that never ends does not keep the interpreter from exiting.
    """

    def __init__(self, name: str) -> None:
        self._calls: Any = queue.SimpleQueue()
        self._outermost = weakref.ref(Future())  # weak, because it holds the result
        threading.Thread(
            target=_serve, args=(self._calls,), name=name, daemon=True
        ).start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def call(self, function: Callable, *arguments: Any) -> Any:
        """The result of a call in this thread.

        A worker that waits for another one's result makes its own calls meanwhile, so
        that calls of workers may be nested in any order.
        """
        own = _own.calls
        if own is self._calls:
            return function(*arguments)
        result: Future = Future()
        outermost = self._outermost()
        if outermost is None or outermost.done():
            self._outermost = weakref.ref(result)
        self._calls.put((result, function, arguments))
        try:
            if own is not None:
                result.add_done_callback(lambda _: own.put(None))
                _serve(own)
            return result.result()
        finally:
            del result  # an error's traceback holds this frame

    def is_idle(self, timeout: float) -> bool:
        """Tells whether all calls have ended, or do so within some seconds."""
        call = self._outermost()
        return call is None or call.done() or not wait([call], timeout).not_done


def _serve(calls):
    """Makes a worker's calls in this thread, which is the worker's, until a None."""
    _own.calls = calls
    for result, function, arguments in iter(calls.get, None):
        try:
            result.set_result(function(*arguments))
        except BaseException as error:
            result.set_exception(error)
        del result, function, arguments  # otherwise the last results stay alive


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
        seeds.watch(_note_seed)
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


def _caller_seed(is_nested):
    """Return the number of seeds, and what the latest leads to in a caller's thread."""
    global _drawn
    # Only then: a draw waits for the generator, and work may use it that waits for us.
    if _drawn[0] != _seeds and not is_nested:
        _drawn = _seeds, seeds.draw()
    return _drawn


def _seed_thread(context, number, value):
    if _seeded.seeds != number:
        _seeded.seeds = number
        seeds.seed(zlib.crc32(f"{value} {context}".encode()) >> 1, ctx=context)


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
