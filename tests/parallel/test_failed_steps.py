"""A failed step changes nothing: all of it happens, or none of it.

A net fails at random places, in all ways to drive devices. Then recover() has to
leave a state of the run without a failure, bit by bit, from which that run goes on.
"""

import time
from contextlib import suppress

import gluon_syncbn

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from support.failed_steps import (
    MODES,
    STEPS,
    Program,
    UsersMistake,
    normal_states,
    undone_kinds,
)
from support.helpers import repetitions, set_mode
from support.mistakes import make_layer, make_shards
from support.mpi import needs_mpi, run_ranks

REPEAT = repetitions()
KINDS = {
    "allow_plain_loop": ["exception", "absent", "ended", "interrupt", "deadlock"],
    "map": ["exception", "absent", "ended", "interrupt"],
    "make_parallel": ["exception", "ended", "interrupt"],
}


@pytest.mark.timeout(100 + 10 * REPEAT)
@pytest.mark.parametrize("way", KINDS)
def test_a_failed_step_changes_nothing(way, ctrl_c):
    """GLUON_SYNCBN_REPEAT=100 for a thousand failures."""
    undone = undone_kinds(range(6 * REPEAT), way, KINDS[way])
    assert undone >= {"exception", "absent"}.intersection(KINDS[way])


RANKS = """
from support.failed_steps import undone_kinds
kinds = ["exception", "absent", "ended"]
undone = undone_kinds(range(int(sys.argv[1])), "ranks", kinds)
assert undone >= {"exception", "absent"}, undone
"""


@needs_mpi
@pytest.mark.timeout(150)
def test_a_failed_step_changes_nothing_on_either_rank():
    run_ranks(2, RANKS, 3 * REPEAT)


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_loop_that_was_left_between_two_contexts(mode, monkeypatch):
    """The next step ends it at once, long before the timeout, and nothing is lost."""
    gluon_syncbn.set_timeout(1000)
    setting = "allow_plain_loop", mode, "adam", ("device", False)
    expected, program = normal_states(setting)[-1], Program(*setting)

    def leave(place, context):
        if place == "loss" and context == mx.cpu(0):
            raise UsersMistake

    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(autograd, "set_recording", interrupt)
        with autograd.record():  # a block that is entered, but never left
            pass
    for number in range(STEPS):
        for _ in range(2):
            with pytest.raises(UsersMistake):
                program.queue(number, leave)
        program.queue(number)
    assert program.state() == expected


def test_an_error_comes_once():
    gluon_syncbn.set_timeout(0.3)
    setting = "map", "hybridize", "sgd", ("device", None)
    expected, program = normal_states(setting)[-1], Program(*setting)

    def absent(place, context):
        return "absent" if context == mx.cpu(1) else None

    with pytest.raises(mx.MXNetError, match="Arrived: cpu.0.*Missing: cpu.1"):
        program.run(0, absent)
    for number in range(STEPS):
        program.queue(number)
    assert program.state() == expected
    program.queue(0, absent)
    while not gluon_syncbn.native.failures.failure():
        time.sleep(0.01)
    with pytest.raises(mx.MXNetError, match="Missing: cpu.1"):  # nobody has read it
        program.queue(0)
    assert program.state() == expected


def test_a_step_without_a_trainer_cannot_be_undone(devices):
    layer = make_layer(devices.contexts, timeout=0.2)
    with autograd.record():
        ys = devices.map(layer, make_shards(devices))
    devices.map_first(lambda y: y.backward(), ys[:1])
    with pytest.raises(mx.MXNetError, match=r"Missing: cpu\(1\)"):
        layer.gamma.grad(mx.cpu(0)).wait_to_read()
    words = f"'{layer.name}' ran in a step.*last checkpoint"
    with pytest.warns(UserWarning, match=words):
        assert gluon_syncbn.recover() == 0


def test_a_trainers_first_step_waits_for_the_first_forward(devices):
    """It copies running statistics, which MXNet takes for inputs of a static graph."""
    layer = set_mode(make_layer(devices.contexts, timeout=0.3), "static_shape")
    trainer = gluon.Trainer(layer.collect_params(), "sgd")
    with autograd.record():
        devices.map_first(layer, make_shards(devices)[:1])
    with pytest.raises(mx.MXNetError, match=r"Missing: cpu\(1\)"):
        trainer.step(1)
