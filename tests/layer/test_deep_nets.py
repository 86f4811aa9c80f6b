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
    assert_trains_like_one_context,
    make_batches,
    plain_net,
    set_mode,
    train,
    twin,
)

import gluon_syncbn


def activated_net(norm, activation, block, slope=None):
    """A deep net with an activation behind every norm: built in, where that can be."""

    def activated():
        if norm.func is gluon_syncbn.SyncBatchNorm:
            return norm(activation=activation, slope=slope)
        pair = nn.HybridSequential()
        pair.add(norm(), block())
        return pair

    return deep_net(activated)


def reconstructing_net(norm):
    """Backward reconstructs x_hat from y, without kinks whose side rounding chooses."""
    return activated_net(norm, "identity", nn.HybridSequential)


def exact_leaky_relu(F, x):
    """MXNet's own takes negative values through float32, whatever the dtype."""
    return F.where(x > 0, x, 0.125 * x)


@pytest.mark.timeout(60 + 30 * REPEAT)
@pytest.mark.parametrize("rows", [[3, 5], [2, 3, 1, 2]], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_trains_like_one_context(mode, rows, make_devices):
    check(mode, rows, make_devices(len(rows)), deep_net)


@pytest.mark.timeout(60 + 30 * REPEAT)
@pytest.mark.parametrize("mode", MODES)
def test_layers_that_free_their_input_train_like_one_context(mode, devices):
    check(mode, [3, 5], devices, reconstructing_net)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "elu"])
def test_built_in_activations_train_like_one_context(activation, mode, devices):
    slope = None if activation == "relu" else 0.125  # exact in MXNet's float32
    blocks = {
        "relu": lambda: nn.Activation("relu"),
        "leaky_relu": lambda: nn.HybridLambda(exact_leaky_relu),
        "elu": lambda: nn.ELU(slope),
    }
    arguments = {"activation": activation, "block": blocks[activation], "slope": slope}
    make_net = functools.partial(activated_net, **arguments)
    assert_trains_like_one_context(make_net, devices, SHAPE, [3, 5], mode)


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
