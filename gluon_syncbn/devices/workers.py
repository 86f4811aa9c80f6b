"""Threads that make calls one after the other, and outlive their users.

It must not know what is called. MXNet keeps about 5 MB for each thread that ever ran an
operator, also when the thread has ended. So a thread that is let go waits for its next
user, and keeps no trace of the former one. Since Python 3.13 it ends, because
``threading.local`` objects cannot be taken from a thread there.
"""

from __future__ import annotations

import contextvars
import ctypes
import gc
import os
import queue
import sys
import threading
import weakref
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, Callable

import mxnet as mx

_FEW = 8
_CAN_FORGET = sys.version_info < (3, 13)
_idle = {}  # for each name the unused workers
_all = weakref.WeakSet()  # also those of the parent process after a fork
_collect_at = _FEW

_thread_dict = ctypes.pythonapi.PyThreadState_GetDict
_thread_dict.restype = ctypes.c_void_p  # for py_object ctypes would own what it returns


@lru_cache(maxsize=None)
def _forget_in_children():
    os.register_at_fork(after_in_child=_idle.clear)  # a child has none of the threads


def hire(name: str) -> Worker:
    """An unused worker of this name, or a new one."""
    _forget_in_children()
    idle = _idle.setdefault(name, [])
    if not idle:
        _collect_dropped()
    try:
        worker = idle.pop()
    except IndexError:
        return Worker(name)
    worker.submit(worker.forget).result()
    return worker


def _collect_dropped():
    """Finds workers of nets that were dropped, if there are many workers.

    A Gluon net refers to itself, so it waits for the garbage collector, which counts
    objects and knows nothing of threads.
    """
    global _collect_at
    if len(_all) >= _collect_at:
        gc.collect()
        _collect_at = max(_FEW, 2 * (len(_all) - sum(map(len, _idle.values()))))


def let_go(workers: list[Worker]) -> None:
    """Makes workers idle; those that are still busy end after their call."""
    for worker in workers:
        if _CAN_FORGET and not worker.pending():
            _idle.setdefault(worker.name, []).append(worker)
        else:
            worker.submit(None)


class Worker:
    """A thread that makes the calls it is given, in order.

    A daemon: a call that never ends does not keep the interpreter from exiting.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls = queue.SimpleQueue()
        self._latest = weakref.ref(Future())  # weak, because it holds the result
        self._context = contextvars.Context()
        _all.add(self)
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable | None, *arguments: Any) -> Future:
        """The Future of a call; None instead of a function ends the thread."""
        call = Future()
        self._latest = weakref.ref(call)
        self._calls.put((call, function, arguments))
        return call

    def pending(self) -> list[Future]:
        """The Future of the latest call, in a list, or nothing if all are done."""
        latest = self._latest()
        return [] if latest is None or latest.done() else [latest]

    def _run(self):
        while True:
            call, function, arguments = self._calls.get()
            if function is None:
                return
            try:
                call.set_result(self._context.run(function, *arguments))
            except BaseException as error:
                call.set_exception(error)
            del call, function, arguments  # otherwise the last results stay alive

    def forget(self) -> None:
        """Makes this thread, which calls it, like a new one."""
        self._context = contextvars.Context()
        # It holds threading.local objects: scopes and names of MXNet's and Gluon's,
        # floating-point settings of NumPy, whatever a caller keeps.
        ctypes.cast(_thread_dict(), ctypes.py_object).value.clear()
        mx.random.seed(0)  # a thread's generators begin with that
        mx.engine.set_bulk_size(0)
