"""A failed step updates nothing: all of its update happens, or none of it.

A net fails at random places, in all ways to drive devices. Parameters and states then
are those of the run without a failure, bit by bit, and that run goes on from them.
"""

import copy
from contextlib import suppress

import gluon_syncbn
from gluon_syncbn.mxnet_private.parameters import trainer_set

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.blocks import sharing
from support.failed_steps import UsersMistake, undone_kinds
from support.helpers import MODES, repetitions, set_mode
from support.mistakes import make_layer, make_shards
from support.mpi import needs_mpi, run_ranks
from support.nd import nd
from support.step_program import STEPS, Program, normal_states

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
from support.failed_steps import fail_for_good
fail_for_good(int(sys.argv[1]), sys.argv[2:])
"""


@needs_mpi
@pytest.mark.timeout(100 + 10 * REPEAT)
@pytest.mark.parametrize("kind", ["exception", "absent", "ended"])
def test_a_failed_step_is_whole_or_undone_on_each_rank(kind):
    for seed in range(REPEAT):
        run_ranks(2, RANKS, seed, kind)


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
    # A forward that was left had taken a batch's statistics already.
    assert program.state() == expected[0]


def test_an_error_stays_until_recover():
    gluon_syncbn.set_timeout(0.3)
    setting = "map", "hybridize", "sgd", ("device", None)
    program = Program(*setting)
    before = program.state()

    def absent(place, context):
        return "absent" if context == mx.cpu(1) else None

    with pytest.raises(mx.MXNetError, match="Arrived: cpu.0.*Missing: cpu.1"):
        program.queue(0, absent)
    for _ in range(2):
        with pytest.raises(mx.MXNetError, match="Missing: cpu.1"):
            program.queue(0)
        with pytest.raises(mx.MXNetError, match="Missing: cpu.1"):
            program.trainer.step(1)
    assert program.state() == before
    gluon_syncbn.recover()
    program.run(0)
    assert program.state() != before


def test_the_step_raises_what_the_loss_has_cleared(devices):
    """The error that a read raises is cleared for all that is still queued."""
    net = set_mode(make_net(devices), "hybridize")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
    before = [array.asnumpy() for array in arrays_of(net)]
    for _ in range(5):
        with autograd.record():
            ys = devices.map_first(net, make_shards(devices)[:1])
        autograd.backward(ys)
        with pytest.raises(mx.MXNetError, match=r"Missing: cpu\(1\)"):
            ys[0].wait_to_read()
        with pytest.raises(mx.MXNetError, match=r"Missing: cpu\(1\)"):
            trainer.step(1)
        gluon_syncbn.recover()
        for array, value in zip(arrays_of(net), before):
            np.testing.assert_array_equal(array.asnumpy(), value)


def make_net(devices):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(3, 1, in_channels=3), make_layer(devices.contexts, timeout=0.2))
    net[0].initialize(ctx=devices.contexts)
    net[0](make_shards(devices)[0])
    return net


def arrays_of(net):
    parameters = net.collect_params().values()
    return [a for p in parameters if p.grad_req != "null" for a in p.list_data()]


def test_only_trainers_of_layers_wait():
    """Also of those made before the conversion, and not after revert."""
    former = dict(vars(gluon.Trainer))
    net, other = nn.HybridSequential(), nn.Dense(1, in_units=1)
    net.add(nn.Dense(2, in_units=2), nn.BatchNorm(in_channels=2))
    net.initialize()
    other.initialize()
    trainers = [gluon.Trainer(x.collect_params(), "sgd") for x in (net, other)]
    own = [set(vars(trainer)) for trainer in trainers]
    gluon_syncbn.convert_sync_batchnorm(net)
    with autograd.record():
        y = net(nd.ones((3, 2)))
    y.backward()
    trainers[0].step(3)
    later = gluon.Trainer(net.collect_params(), "sgd")
    methods = {"step", "_init_kvstore", "_init_params", "_allreduce_grads", "_update"}
    assert set(vars(trainers[0])) - own[0] == methods
    assert set(vars(later)) - own[0] == methods
    gluon_syncbn.revert_sync_batchnorm(net)
    for trainer, names in zip([*trainers, later], [*own, own[0]]):
        assert set(vars(trainer)) == names
    assert set(vars(gluon.Trainer(net.collect_params(), "sgd"))) == own[0]
    assert dict(vars(gluon.Trainer)) == former


def test_layers_that_share_parameters_are_reverted_one_by_one():
    first = gluon_syncbn.SyncBatchNorm(in_channels=2)
    nets = nn.HybridSequential(), nn.HybridSequential()
    nets[0].add(first)
    nets[1].add(sharing(first, gluon_syncbn.SyncBatchNorm, in_channels=2))
    nets[0].initialize()
    for net in nets:
        net(nd.ones((1, 2)))
    for net, waits in zip(nets, (True, False)):
        gluon_syncbn.revert_sync_batchnorm(net)
        trainer = gluon.Trainer(first.params, "sgd")
        assert ("step" in vars(trainer)) == waits


def test_copies_of_a_net_have_trainers_of_their_own(devices):
    layer = make_layer(devices.contexts)
    with autograd.predict_mode():
        devices.map(layer, make_shards(devices))
    twin = copy.deepcopy(layer)
    trainer = gluon.Trainer(twin.collect_params(), "sgd")
    assert trainer_set(twin.gamma) is trainer
    assert trainer_set(layer.gamma) is None and "step" in vars(trainer)


def test_a_trainers_first_step_waits_for_the_first_forward(devices):
    """It copies running statistics, which MXNet takes for inputs of a static graph."""
    layer = set_mode(make_layer(devices.contexts, timeout=0.3), "static_shape")
    trainer = gluon.Trainer(layer.collect_params(), "sgd")
    with autograd.record():
        devices.map_first(layer, make_shards(devices)[:1])
    with pytest.raises(mx.MXNetError, match=r"Missing: cpu\(1\)"):
        trainer.step(1)
