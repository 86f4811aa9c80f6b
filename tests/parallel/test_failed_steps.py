"""A failed step changes nothing: all of it happens, or none of it.

A net fails at random places, in all ways to drive devices. Then recover() has to
leave a state of the run without a failure, bit by bit, from which that run goes on.
"""

import time

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from support.deep_nets import REPEAT
from support.failed_steps import (
    MODES,
    STEPS,
    Program,
    UsersMistake,
    normal_states,
    undone_kinds,
)
from support.mpi import needs_mpi, run_ranks

import gluon_syncbn

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
def test_a_plain_loop_that_was_left_between_two_contexts(mode):
    """The next step ends it at once, long before the timeout, and nothing is lost."""
    gluon_syncbn.set_timeout(1000)
    setting = "allow_plain_loop", mode, "adam", ("device", False)
    expected, program = normal_states(setting)[-1], Program(*setting)

    def leave(place, context):
        if place == "loss" and context == mx.cpu(0):
            raise UsersMistake

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

    def read(losses):
        for loss in losses:
            loss.wait_to_read()

    with pytest.raises(mx.MXNetError, match="Arrived: cpu.0.*Missing: cpu.1"):
        read(program.queue(0, absent))
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
    layers = [gluon_syncbn.SyncBatchNorm(in_channels=3, timeout=0.2) for _ in range(2)]
    for layer in layers:
        layer.initialize(ctx=devices.contexts)
    xs = [mx.nd.ones((2, 3), ctx=context) for context in devices.contexts]

    def forward(x):
        y = layers[0](x)
        return layers[1](y) if x.context == mx.cpu(0) else y

    with autograd.train_mode():
        for y in devices.map(forward, xs):
            try:
                y.wait_to_read()
            except mx.MXNetError:
                pass
    name = layers[0].name
    with pytest.warns(UserWarning, match=f"'{name}' ran in a step.*last checkpoint"):
        assert gluon_syncbn.recover() == 0


def test_a_trainers_first_step_waits_for_the_first_forward(devices):
    """It copies running statistics, which MXNet takes for inputs of a static graph."""
    layer = gluon_syncbn.SyncBatchNorm(in_channels=3, timeout=0.3)
    layer.initialize(ctx=devices.contexts)
    layer.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(layer.collect_params(), "sgd")
    with autograd.record():
        devices.map_first(layer, [mx.nd.ones((2, 3))])
    with pytest.raises(mx.MXNetError, match=r"Missing: cpu\(1\)"):
        trainer.step(1)
