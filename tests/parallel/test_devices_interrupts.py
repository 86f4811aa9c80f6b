"""Signals in training: the first Ctrl-C waits for every context, a second does not."""

import contextlib
import os
import random
import signal
import sys
import threading
import time

import gluon_syncbn
from gluon_syncbn.mxnet_private import tape
from gluon_syncbn.parallel import participants

import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.helpers import differentiate, output_of, ready, repetitions
from support.nd import nd

TRIALS = 125 * repetitions()

STUCK = """
import os, signal, threading, time
import gluon_syncbn, mxnet as mx

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGALRM, signal.default_int_handler)
gluon_syncbn.set_timeout(1)
interrupted = threading.Event()

def press():
    while not interrupted.wait(0.05):
        os.kill(os.getpid(), signal.SIGINT)

def ring():
    signal.setitimer(signal.ITIMER_REAL, 0.1)

def never_ends():
    while True:
        time.sleep(0.01)

devices = gluon_syncbn.Devices([mx.cpu(0), mx.cpu(1)])
try:
    threading.Thread(target=SEND).start()
    devices.map(never_ends)
except KeyboardInterrupt:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupted.set()
    print("interrupted")
print(devices.map(int))
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("send", ["press", "ring"])
def test_a_function_that_never_ends_can_be_left(send):
    """Ctrl-C twice ends it, and so does one exception of another signal's handler."""
    assert output_of(STUCK.replace("SEND", send)).splitlines() == [
        "interrupted",
        "[0, 0]",
    ]


def test_a_profilers_timer_after_ctrl_c_does_not_end_the_map(devices):
    """The timer's handler raises nothing, so all contexts are called."""
    contexts, rung = [], threading.Event()

    def call(context):
        contexts.append(context)
        if len(contexts) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
            assert rung.wait(20)

    former = signal.signal(signal.SIGALRM, lambda *_: rung.set())
    # The background jobs of a shell script ignore SIGINT.
    former_int = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        devices.map(call, devices.contexts)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, former)
    signal.signal(signal.SIGINT, former_int)
    assert contexts == devices.contexts


class Raised(Exception):
    """The exception of a signal's handler."""


def test_an_interrupted_map_waits_for_its_thread(devices):
    """MXNet crashes if two threads call it at once."""
    done = []

    def call(_):
        os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(0.3)
        done.append(True)

    def handle(*_):
        raise Raised

    former = signal.signal(signal.SIGALRM, handle)
    with pytest.raises(Raised):
        devices.map(call, devices.contexts)
    signal.signal(signal.SIGALRM, former)
    assert done == [True]


FOLDER = os.path.dirname(gluon_syncbn.__file__)
FILES = contextlib.__file__, gluon.trainer.__file__


# Exceptions inside these functions once did harm. A test raises one at each opcode.
FUNCTIONS = (
    tape.differentiate,  # a flag of MXNet stayed set, and later backwards did nothing
    gluon.Trainer._update,  # only some parameters were updated
    participants.only_participants.__wrapped__,  # later calls raised errors
)


def in_a_step(code):
    return code.co_filename in FILES or code.co_filename.startswith(FOLDER)


def in_functions(code):
    return any(code is function.__code__ for function in FUNCTIONS)


class SignalAt:
    """Sends a signal before opcode `place` of the code that `is_selected` accepts."""

    def __init__(self, place, number, is_selected):
        self.opcodes_left, self._number, self._is_selected = place, number, is_selected

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception):
        sys.settrace(None)

    def _call(self, frame, _event, _argument):
        if not self._is_selected(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._operate

    def _operate(self, _frame, event, _argument):
        if event == "opcode":
            self.opcodes_left -= 1
            if self.opcodes_left == 0:
                signal.raise_signal(self._number)
        return self._operate


@pytest.mark.timeout(60 + TRIALS)
@pytest.mark.parametrize(
    "number, is_selected",
    [
        (signal.SIGINT, in_a_step),
        (signal.SIGALRM, in_a_step),
        (signal.SIGALRM, in_functions),
    ],
)
def test_a_handler_raises_at_any_instant_of_a_step(number, is_selected, make_devices):
    """The step has fewer rows than contexts. GLUON_SYNCBN_REPEAT multiplies TRIALS."""

    def handle(*_):
        raise Raised

    handle.handler = signal.SIG_IGN  # this attribute must be ignored

    def step():
        differentiate(lambda: net(rows) * nd.array([[1], [2]]))
        trainer.step(2)

    net = nn.HybridSequential()
    net.add(nn.BatchNorm(in_channels=2), nn.Dense(1, in_units=2))
    net = ready(gluon_syncbn.make_parallel(net, make_devices(3).contexts))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9})
    trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
    rows = nd.array([[1, 2], [3, 5]])
    step()
    with SignalAt(0, number, is_selected) as counter:  # counts, and sends no signal
        step()
    places = range(1, 1 - counter.opcodes_left)
    if is_selected is in_a_step:
        places = random.Random(0).choices(places, k=TRIALS)
    gluon_syncbn.set_timeout(3)
    former, count = signal.signal(number, handle), 0
    try:
        for place in places:
            before = [p.data().asnumpy() for p in trained]
            try:
                with SignalAt(place, number, is_selected):
                    step()
            except Raised:
                sys.settrace(None)
                count += 1
                autograd.set_recording(False)  # MXNet's own scopes may stay open
                autograd.set_training(False)
                gluon_syncbn.recover()
            gluon_syncbn.check_replicas(net)
            pairs = zip(before, trained)
            assert len({np.array_equal(x, p.data().asnumpy()) for x, p in pairs}) == 1
            assert signal.getsignal(number) is handle
        step()
        assert count > len(places) / 2
    finally:
        signal.signal(number, former)
