"""Training steps that fail on purpose, and the states that they must leave.

A run without a failure gives the state after each step. A failed step has to leave one
of the two states around it, bit by bit, and the steps that follow have to lead where
they lead without it. Only running statistics may have a failed batch's share, which is
finite; they are set to what they are without it.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress

import gluon_syncbn
from gluon_syncbn.distributed import meeting
from gluon_syncbn.native import failures

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

from support.step_program import STEPS, Program, normal_states, random_setting

LONG, SHORT = 20, 0.3  # timeouts in seconds, of steps that succeed and that fail


class UsersMistake(Exception):
    """What a program raises by itself."""


def saboteur(kind, rng, contexts):
    """A function that lets one step fail; Program.queue calls it at some places."""
    where = rng.choice(["forward", "loss", "backward", "step", "end"])
    victim, seconds = rng.choice(contexts), rng.random() * 0.02

    def strike(place, context):
        is_here = place == where and context in (victim, None)
        if kind == "exception" and is_here and place != "end":
            raise UsersMistake(place)
        if kind == "absent" and place == "forward" and context == victim:
            return "absent"
        if kind == "ended" and is_here:
            time.sleep(seconds)
            failures.end_waits("ended by the test")
        if kind == "interrupt" and place == "forward" and context == contexts[0]:
            arguments = os.getpid(), signal.SIGINT
            threading.Timer(seconds, os.kill, arguments).start()
        return None

    return strike


def fail(program, number, kind, states, rng):
    """Lets a step fail, and recovers.

    `states` has the right state before each step, by its number. Returns the number of
    the step that is to be done next.
    """
    strike, reads = saboteur(kind, rng, program.participants), rng.random() < 0.5
    gluon_syncbn.set_timeout(SHORT)
    if kind == "deadlock":
        del program.net.forward  # the plain loop is not allowed any more
    fails(program, number, strike, rng if reads else None)
    if kind == "interrupt":
        with suppress(KeyboardInterrupt):  # if it has not come yet
            time.sleep(0.05)
        # In the first line of a scope's __exit__ it leaves what the scope has set.
        autograd.set_recording(False)
        autograd.set_training(False)
    gluon_syncbn.recover()
    gluon_syncbn.set_timeout(LONG)
    if kind == "deadlock":
        gluon_syncbn.allow_plain_loop(program.net)
    step = whole_step(program, number, kind, states)
    program.set_statistics(states[step][1])
    return step


def fails(program, number, strike, reads=None):
    """Whether the step has failed; afterwards a program may read something first."""
    try:
        program.run(number, strike)
        program.finish()
    except (mx.MXNetError, UsersMistake, KeyboardInterrupt):
        if reads:
            program.try_to_read(reads)
        return True
    return False


def whole_step(program, number, kind, states):
    """The number of the next step; an error unless this one was whole or undone."""
    state = program.state()
    steps = [n for n in (number, number + 1) if states[n][0] == state]
    assert steps, f"{program.setting}, {kind} in step {number}: a mixture"
    return steps[0]


def fail_for_good(seed, kinds):
    """One rank's part of a program of several, of which one step fails on all of them.

    Some may have had their update, as the failure reaches a rank before its step is
    whole and another after it; so all have to start again.
    """
    rng = random.Random(seed)
    setting = random_setting(rng, "ranks")
    states, program = normal_states(setting), Program(*setting)
    last, kind = rng.randrange(STEPS), rng.choice(kinds)
    strike = saboteur(kind, rng, program.participants)
    for number in range(last + 1):
        if number == last:
            gluon_syncbn.set_timeout(SHORT)
        # The other rank's failure may reach this one in the step before.
        if fails(program, number, strike if number == last else None, rng):
            failures.end_waits("given up by the test")
            break
    with suppress(mx.MXNetError):
        meeting.total("a test's barrier", timeout=LONG)
        return  # nothing has failed on any rank
    with pytest.raises(mx.MXNetError, match="start the program again, from its check"):
        gluon_syncbn.recover()
    step = whole_step(program, number, kind, states)
    with pytest.raises(mx.MXNetError, match="of an earlier error"):
        meeting.total("a test's barrier", timeout=LONG)
    with pytest.raises((mx.MXNetError, UsersMistake)):
        program.run(number)
    failures.give_up("for the queued part of that step")
    assert program.state() == states[step][0]


def undone_kinds(seeds, way, kinds):
    """The kinds of failures that undid a step of each seed's random program.

    Two of its steps fail once; it has to come to the same end as without.
    """
    expected, undone = {}, set()
    for seed in seeds:
        rng = random.Random(seed)
        setting = random_setting(rng, way)
        if setting not in expected:
            expected[setting] = normal_states(setting)
        states, program = expected[setting], Program(*setting)
        number, failing = 0, rng.sample(range(STEPS), 2)
        while number < STEPS:
            if number not in failing:
                program.run(number)
                number += 1
                continue
            failing.remove(number)
            kind = rng.choice(kinds)
            begin = fail(program, number, kind, states, rng)
            if begin <= number:
                undone.add(kind)
            number = begin
        assert_ends(program, states[-1])
    return undone


def assert_ends(program, expected):
    """The program's state and statistics are those of a run without a failure."""
    state, statistics = program.state(), program.statistics()
    assert state == expected[0], f"{program.setting}: another end"
    for name, arrays in statistics.items():
        np.testing.assert_array_equal(arrays, expected[1][name], name)
