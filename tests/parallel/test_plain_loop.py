"""allow_plain_loop: several CPU contexts in the loops that users write for GPUs.

Random programs make plain loops with one backward for all contexts.
"""

import copy

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import Trainer, loss, nn
from mxnet.gluon.utils import split_and_load
from support.helpers import MODES, cpus, differentiate, set_mode, value, whole
from support.parallel_nets import (
    SHAPE,
    assert_same,
    batches,
    pair,
    parameters,
    small_net,
    train,
)

from gluon_syncbn import allow_plain_loop, check_replicas

ROWS = [5, 3, 4]


def train_in_a_loop(net, contexts):
    """A script's loop, with a backward for each; returns losses of whole batches."""
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    criterion = loss.SoftmaxCrossEntropyLoss()
    results = []
    for x, label in batches(ROWS):
        xs, labels = (split_and_load(v, contexts, even_split=False) for v in (x, label))
        with autograd.record():
            losses = [criterion(net(part), label) for part, label in zip(xs, labels)]
        for each in losses:
            each.backward()
        trainer.step(len(x))
        results.append(whole(losses))
    mx.nd.waitall()
    return results


@pytest.mark.parametrize("mode", MODES)
def test_trains_like_one_device(mode):
    contexts = cpus(2)
    plain, parallel = pair(contexts, mode)
    net = set_mode(allow_plain_loop(parallel.net), mode)
    results = train_in_a_loop(net, contexts)
    for result, right in zip(results, train(plain, ROWS)):
        assert_same(result, right)
    for mine, other in zip(parameters(net), parameters(plain)):
        assert_same(value(mine), value(other))
    check_replicas(net)


def test_prediction_and_one_context_stay_as_they_are():
    net = allow_plain_loop(small_net())
    assert allow_plain_loop(net) is net
    net.initialize()
    x = mx.nd.ones((2, *SHAPE))
    assert net(x).shape == (2, 3)
    differentiate(net, x)
    net.collect_params().reset_ctx(cpus(2))
    y = [net(mx.nd.ones((2, *SHAPE), ctx=c)).asnumpy() for c in cpus(2)]
    np.testing.assert_array_equal(y[0], y[1])


def test_a_copy_has_parameters_of_its_own():
    net = allow_plain_loop(nn.Dense(1, in_units=2))
    twin = copy.deepcopy(net)
    net.initialize(mx.init.One())
    twin.initialize(mx.init.Zero())
    x = mx.nd.ones((1, 2))
    assert net(x).asnumpy() == 2 and twin(x).asnumpy() == 0
