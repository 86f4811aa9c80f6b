"""Ctrl-C in Devices.map: it waits for every context, and a second one does not."""

import os
import signal
import threading
import time

import pytest
from support.helpers import output_of


def interrupting(seen):
    """A function to map that presses Ctrl-C in its first call."""

    def function(x):
        seen.append(x)
        if len(seen) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)  # the main thread runs its handler while this one rests
        return x

    return function


def test_ctrl_c_waits_until_every_context_was_called(devices, ctrl_c):
    seen, noted = [], []
    with pytest.raises(KeyboardInterrupt):
        devices.map(interrupting(seen), [1, 2])
    assert seen == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, lambda signum, frame: noted.append(signum))
    seen.clear()
    assert devices.map(interrupting(seen), [1, 2]) == [1, 2]
    assert noted == [signal.SIGINT]


def test_second_ctrl_c_is_immediate(devices, ctrl_c):
    seen, handled = [], threading.Event()

    def handler(signum, frame):
        if not handled.is_set():
            handled.set()
            raise KeyboardInterrupt

    def press(x):
        seen.append(x)
        while not handled.is_set():  # signals may be merged
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    signal.signal(signal.SIGINT, handler)
    with pytest.raises(KeyboardInterrupt):
        devices.map(press, [1, 2])
    assert seen == [1]
    assert signal.getsignal(signal.SIGINT) is handler
    assert devices.map(abs, [-1, -2]) == [1, 2]


STUCK = """
import os, signal, threading, time
import gluon_syncbn, mxnet as mx

signal.signal(signal.SIGINT, signal.default_int_handler)
gluon_syncbn.set_timeout(1)
left = threading.Event()

def press():
    while not left.wait(0.05):
        os.kill(os.getpid(), signal.SIGINT)

def never_ends():
    while True:
        time.sleep(0.01)

devices = gluon_syncbn.Devices([mx.cpu(0), mx.cpu(1)])
try:
    threading.Thread(target=press).start()
    devices.map(never_ends)
except KeyboardInterrupt:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    left.set()
try:
    devices.map(int)
except RuntimeError as error:
    print(error)
devices.close()
with gluon_syncbn.Devices(devices.contexts) as others:
    print(others.map(int))
"""


def test_a_function_that_never_ends_can_be_left():
    error, others = output_of(STUCK).splitlines()
    assert error.startswith("the function that map called for cpu(0)")
    assert others == "[0, 0]"
