"""A thread for each context, made at first use, that lives as long as its process.

It must not know what is called. MXNet keeps about 5 MB for each thread that ever ran an
operator, also when the thread has ended.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from concurrent.futures import Future, wait
from typing import Any, Callable

import mxnet as mx


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
