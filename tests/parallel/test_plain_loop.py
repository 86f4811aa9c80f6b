"""allow_plain_loop: several CPU contexts in the loops that users write for GPUs."""

import copy

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import Trainer, loss, nn
from support.helpers import (
    MODES,
    cpus,
    differentiate,
    put,
    set_mode,
    split_rows,
    value,
    whole,
)
from support.parallel_nets import (
    SHAPE,
    Traced,
    assert_same,
    batches,
    pair,
    parameters,
    small_net,
    train,
)

from gluon_syncbn import (
    allow_plain_loop,
    check_replicas,
    convert_sync_batchnorm,
)


def train_in_a_loop(net, contexts, rows, backward=autograd.backward):
    """A script's loop; returns the losses of whole batches."""
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    criterion = loss.SoftmaxCrossEntropyLoss()
    results = []
    for x, label in batches([sum(r) for r in rows]):
        shares = rows[len(results)]
        with autograd.record():
            parts = (split_rows(v.asnumpy(), shares) for v in (x, label))
            shards = zip(*(put(part, contexts, "float64") for part in parts))
            losses = [criterion(net(part), labels) for part, labels in shards]
            backward(losses)
        trainer.step(len(x))
        results.append(whole(losses))
    mx.nd.waitall()
    return results


def one_by_one(losses):
    for each in losses:
        each.backward()


ROWS = [[3, 2], [1, 4], [2, 2], [5, 1]]


@pytest.mark.parametrize("backward", [autograd.backward, one_by_one])
@pytest.mark.parametrize("mode", MODES)
def test_trains_like_one_device(mode, backward):
    contexts = cpus(2)
    plain, parallel = pair(contexts, mode)
    net = set_mode(allow_plain_loop(parallel.net), mode)
    expected = train(plain, [sum(rows) for rows in ROWS])
    results = train_in_a_loop(net, contexts, ROWS, backward)
    for result, right in zip(results, expected):
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
    assert net(x).asscalar() == 2 and twin(x).asscalar() == 0


def test_graphs_are_freed():
    net, traced = nn.Sequential(), Traced()
    net.add(nn.Dense(1, in_units=1), nn.BatchNorm(), traced)
    net = allow_plain_loop(convert_sync_batchnorm(net))
    net.initialize(ctx=cpus(2))
    xs = [mx.nd.ones((2, 1), ctx=context) for context in cpus(2)]
    for _ in range(3):
        with autograd.record():
            ys = [net(x) for x in xs]
        del ys  # never differentiated
    assert traced.count_graphs() == 0
