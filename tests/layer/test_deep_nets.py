"""Deep, branched float32 nets train on several CPU contexts, again and again.

They show what one layer does not: inputs in oneDNN's blocked layouts that MXNet frees
too early, contributions to the wrong rendezvous, and operators that wait for each
other's CPU resources.
"""

import functools

import pytest
from mxnet.gluon import nn
from support.deep_nets import REPEAT, SHAPE, STEPS, assert_true, deep_net
from support.helpers import (
    MODES,
    make_batches,
    plain_net,
    set_mode,
    train,
    twin,
)

import gluon_syncbn


def reconstructing_net(norm):
    """Backward reconstructs x_hat from y, without kinks whose side rounding chooses."""
    if norm.func is gluon_syncbn.SyncBatchNorm:
        norm = functools.partial(norm, activation="identity")
    return deep_net(norm)


@pytest.mark.timeout(60 + 30 * REPEAT)
@pytest.mark.parametrize("rows", [[3, 5], [2, 3, 1, 2]], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_trains_like_one_context(mode, rows, make_devices):
    check(mode, rows, make_devices(len(rows)), deep_net)


@pytest.mark.timeout(60 + 30 * REPEAT)
@pytest.mark.parametrize("mode", MODES)
def test_layers_that_free_their_input_train_like_one_context(mode, devices):
    check(mode, [3, 5], devices, reconstructing_net)


# Gluon's Sequential has a graph for each child: there a layer is a graph of its own,
# whose inputs and incoming gradients are results of convolutions.
@pytest.mark.timeout(60 + 30 * REPEAT)
@pytest.mark.parametrize("mode", ["hybridize", "static_alloc", "static_shape"])
def test_a_graph_for_each_child_trains_like_one_context(mode, devices):
    check(mode, [3, 5], devices, functools.partial(deep_net, container=nn.Sequential))


def check(mode, rows, devices, make_net):
    batches = make_batches((8, 4, 10, 10), SHAPE, STEPS, "float32")
    plain = plain_net(make_net, SHAPE, "float32")
    for repeat in range(REPEAT):
        net = twin(plain, make_net, devices.contexts, "float32")
        values = train(set_mode(net, mode), devices, batches, rows, learning_rate=0.01)
        assert_true(values, repeat)
