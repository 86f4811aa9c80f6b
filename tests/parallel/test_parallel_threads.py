"""Several nets at once, in threads of their own.

GLUON_SYNCBN_REPEAT=250 makes a thousand steps of each.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

from gluon_syncbn import SyncBatchNorm, allow_plain_loop, check_replicas, recover
from gluon_syncbn.native import failures

import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support.blocks import in_threads
from support.helpers import cpus, repetitions
from support.nd import nd
from support.nets import Normalized, started, state_of, train

REPEAT = repetitions()


@in_threads
def trained(mode, contexts):
    """Train a net, plain without contexts; return its losses and parameters."""
    net = started(Normalized(), contexts, mode, seed=len(contexts))
    return train(net, [6] * 4 * REPEAT) + state_of(net)


@pytest.mark.timeout(120 + 6 * REPEAT)
@pytest.mark.parametrize("mode", ["imperative", "static_shape"])
def test_parallel_nets_and_a_plain_one(mode):
    arguments = [mode] * 3, [cpus(2), cpus(3), []]
    expected = list(map(trained, *arguments))
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(trained, *arguments))
    for arrays, rights in zip(results, expected):
        for number, (result, right) in enumerate(zip(arrays, rights)):
            np.testing.assert_array_equal(result, right, err_msg=f"array {number}")


def test_a_plain_loop_goes_on_after_the_net_has_moved():
    """No round of calls waits for a context that the net has left."""
    net = allow_plain_loop(nn.Dense(1, in_units=2))
    net.initialize(ctx=cpus(2))
    number = failures.latest_recovery[0]
    for contexts in cpus(2), cpus(1):
        net.collect_params().reset_ctx(contexts)
        for _ in range(3):
            with autograd.record():
                losses = [net(nd.ones((1, 2), ctx=context)) for context in contexts]
            autograd.backward(losses)
    assert failures.latest_recovery[0] == number


def test_recover_waits_for_the_turn_of_another_thread(devices):
    """A step that is given up between two contexts would leave one waiting."""
    layer = SyncBatchNorm(num_devices=2, in_channels=1, timeout=5)
    layer.initialize(ctx=devices.contexts)
    shards = [nd.ones((2, 1), ctx=c) for c in devices.contexts]
    begun, recovering = Event(), Event()

    def call(shard):
        y = layer(shard)
        if shard.context == devices.contexts[0]:
            begun.set()
            recovering.wait(0.5)
        return y

    def step():
        with autograd.train_mode():
            ys = devices.map(call, shards)
        for y in ys:
            y.wait_to_read()

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(step)
        begun.wait()
        recover()
        assert "cpu(1)" not in str(first.exception())  # as a timeout names it
        error = threads.submit(step).exception()
        assert "gluon_syncbn.recover() in another thread" in str(error)
        number = failures.latest_recovery[0]
        threads.submit(recover).result()  # it has been told, so it cancels nothing
        assert failures.latest_recovery[0] == number
        threads.submit(step).result()


def noisy_net(contexts):
    """Make a net whose random operators share memory if one thread pushes them."""
    net = nn.HybridSequential()
    for _ in range(20):
        net.add(SyncBatchNorm(in_channels=2, timeout=10), nn.Dropout(0.1))
    net.initialize(ctx=contexts)
    return allow_plain_loop(net)


def test_plain_loops_that_come_to_the_contexts_in_different_orders():
    """As loops of two training threads do now and then: each net has its threads."""
    contexts = cpus(2)
    first, second = noisy_net(contexts), noisy_net(contexts)
    calls = (first, 0), (second, 1), (first, 1), (second, 0)
    # Each call has its input: making an input plain waits for all its readers.
    xs = [nd.random.normal(shape=(4, 2), ctx=contexts[k]) for _, k in calls]
    with autograd.train_mode():
        ys = [net(x) for (net, _), x in zip(calls, xs)]
    for y in ys:
        y.wait_to_read()
    for net in first, second:  # statistics of both contexts together
        check_replicas(net)
        assert (net[0].running_mean.data() != 0).asnumpy().all()
