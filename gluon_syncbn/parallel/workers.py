"""Threads that run calls for a context, one after the other.

MXNet keeps about 5 MB for each thread that ever ran an operator, also when the thread
has ended. So `Workers` keep one thread for each context.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from concurrent.futures import Future, wait
from typing import Any, Callable

import mxnet as mx

from ..native.timeouts import lock_timeout


class _Thread(threading.local):
    calls: Any = None  # the queue of the thread's Worker


_thread = _Thread()


class Worker:
    """A thread that runs calls in order while this object lives."""

    def __init__(self, name: str) -> None:
        self._calls: Any = queue.SimpleQueue()
        self.unfinished: set = set()  # the results of calls that have not ended
        threading.Thread(
            target=_serve, args=(self._calls,), name=name, daemon=True
        ).start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def call(self, function: Callable, *arguments: Any) -> Any:
        """Call a function in this object's thread, and return its result."""
        callers_queue = _thread.calls
        if callers_queue is self._calls:
            return function(*arguments)
        result: Future = Future()
        result.add_done_callback(self.unfinished.discard)
        self.unfinished.add(result)
        self._calls.put((result, function, arguments))
        try:
            if callers_queue is not None:  # a Worker runs its own calls while it waits
                result.add_done_callback(lambda _: callers_queue.put(None))
                _serve(callers_queue)
            return result.result()
        finally:
            del result  # an error's traceback holds this frame


def _serve(calls):
    _thread.calls = calls
    for result, function, arguments in iter(calls.get, None):
        try:
            result.set_result(function(*arguments))
        except BaseException as error:
            result.set_exception(error)
        del result, function, arguments  # otherwise the last results stay alive


class Workers:
    """A Worker for each context, created at first use. A fork creates new Workers."""

    def __init__(self) -> None:
        self._workers: dict = {}

    def __reduce__(self) -> tuple:  # a deep copy of a net creates other Workers
        return Workers, ()

    def worker_for(self, context: mx.Context) -> Worker:
        key = os.getpid(), context
        if key not in self._workers:
            self._workers[key] = Worker(f"gluon_syncbn-{context}")
        return self._workers[key]

    def are_busy(self) -> bool:
        """Return True if calls may run whose caller was interrupted."""
        return any(worker.unfinished for worker in list(self._workers.values()))

    def finish(self) -> None:
        """Wait for calls whose caller was interrupted.

        If a call does not end within the timeout, its thread is not used again.
        """
        for key, worker in list(self._workers.items()):
            calls = list(worker.unfinished)
            if calls and key[0] == os.getpid():
                if wait(calls, lock_timeout()).not_done:
                    del self._workers[key]
