"""Devices: shards, order, threads, flags, seeds, and calls inside of calls."""

import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import gluon_syncbn
from gluon_syncbn import (
    SyncBatchNorm,
    allow_plain_loop,
    check_replicas,
    make_parallel,
    recover,
)
from gluon_syncbn.layer.synchronization import Synchronization
from gluon_syncbn.native import failures

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.blocks import in_threads, move
from support.helpers import Loop, cpus, ready, repetitions, set_mode
from support.nd import nd
from support.nets import Normalized, started, state_of, train

REPEAT = repetitions()


@pytest.mark.parametrize("kind", ["array", "float16", "uint8"])
@pytest.mark.parametrize("axis", [0, 1])
def test_split_gives_the_first_contexts_one_row_more(axis, kind, make_devices):
    devices, batch = make_devices(3), np.arange(16).reshape((8, 2)[:: 1 - 2 * axis])
    given = nd.array(batch) if kind == "array" else batch.astype(kind)
    parts = devices.split(given, axis)
    assert [part.shape[axis] for part in parts] == [3, 3, 2]
    assert [part.context for part in parts] == devices.contexts
    assert all(part.dtype == given.dtype for part in parts)
    joined = np.concatenate([part.asnumpy() for part in parts], axis)
    assert (joined == batch).all()


def test_map_calls_in_order_with_the_elements_of_each_context(make_devices):
    devices, seen = make_devices(3), []

    def note(a, b):
        seen.append((a, b, mx.current_context()))
        return a + b

    assert devices.map(note, [1, 2, 3], b"abc") == [98, 100, 102]
    expected = [(1, 97, mx.cpu(0)), (2, 98, mx.cpu(1)), (3, 99, mx.cpu(2))]
    assert seen == expected
    assert devices.map_first(note, [1, 2], b"ab") == [98, 100]
    assert seen == expected + expected[:2]


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_state_of_the_caller_holds_inside(recording, training, devices):
    def state():
        flags = autograd.is_recording(), autograd.is_training()
        return *flags, mx.util.is_np_array(), mx.util.is_np_shape()

    default = mx.util.is_np_array(), mx.util.is_np_shape()
    scope = autograd.record if recording else autograd.pause
    for _ in range(2):  # the threads must not keep the state of a call
        with scope(train_mode=training):
            assert devices.map(state) == [(recording, training, *default)] * 2
        with mx.util.np_shape(True), mx.util.np_array(True):
            assert devices.map(state) == [(False, False, True, True)] * 2
        assert devices.map(state) == [(False, False, *default)] * 2
    # `with context` stores the former context in `context`. The device's thread also
    # uses this object, but must not overwrite what is stored.
    with mx.cpu(3):
        with devices.contexts[0]:
            devices.map(int)
        assert mx.current_context() == mx.cpu(3)


def test_a_context_has_one_thread_whoever_calls(make_devices):
    first = make_devices(2).map(threading.get_ident)
    assert make_devices(3).map(threading.get_ident)[:2] == first
    (ident,) = make_devices(1, first=1).map(threading.get_ident)
    assert ident == first[1]
    assert len({*first, threading.get_ident()}) == 3


def test_a_loop_of_the_main_thread_is_warned_of(devices, monkeypatch):
    """The layer warns once, although the net is traced before the loop begins."""
    monkeypatch.setattr(Synchronization, "has_warned", False)
    net = set_mode(nn.HybridSequential(), "hybridize")
    net.add(SyncBatchNorm(in_channels=1))
    net.initialize(ctx=devices.contexts)
    shards = [nd.ones((2, 1), ctx=c) for c in devices.contexts]
    with warnings.catch_warnings(), autograd.train_mode():
        warnings.simplefilter("error", UserWarning)
        devices.map(net, shards)
        with pytest.warns(UserWarning, match=r"allow_plain_loop\(net\)"):
            net(shards[0])
        net(shards[1])
        mx.nd.waitall()


def draws(seed, count, way, mode):
    """Return the initial weight, and Dropout's mask in each call for each context."""
    mx.random.seed(seed)
    contexts = cpus(count)
    net = nn.HybridSequential()
    net.add(nn.Dense(50, use_bias=False), nn.Dropout(0.5))
    loop = Loop(contexts if way is allow_plain_loop else contexts[:1])
    net = way(net) if way is allow_plain_loop else way(net, contexts)
    net.initialize(mx.init.Normal(), ctx=contexts)
    set_mode(net, mode)
    x = nd.ones((count, 3))
    masks = []
    for _ in range(2):
        with autograd.train_mode():
            ys = loop.map(net, gluon.utils.split_and_load(x, loop.contexts))
        masks.append(np.concatenate([y.asnumpy() for y in ys]) == 0)
    return net[0].weight.data(contexts[0]).asnumpy(), np.concatenate(masks)


@pytest.mark.parametrize("mode", ["imperative", "static_shape"])
@pytest.mark.parametrize("way", [make_parallel, allow_plain_loop])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_seed_decides_weights_and_masks(count, way, mode):
    """Equal seeds repeat a run. Other seeds, contexts and calls differ."""
    (weights, masks), same, other = (draws(s, count, way, mode) for s in (1, 1, 2))
    assert (same[0] == weights).all() and (same[1] == masks).all()
    assert (other[0] != weights).any() and (other[1] != masks).any()
    assert len({row.tobytes() for row in masks}) == 2 * count


def test_a_seed_set_by_one_map_decides_the_numbers_of_the_next(devices):
    def draw():
        return mx.nd.random.uniform(shape=(3,)).asnumpy().tolist()

    runs = []
    for _ in range(2):
        devices.map(lambda: mx.random.seed(3))
        runs.append(devices.map(draw))
    assert runs[0] == runs[1]


# ---- Calls of `map` inside of one another, and from several threads in turns.


def contexts_of_calls(*chain):
    """Return the contexts that the functions of nested maps are called on."""
    first, *others = chain
    inner = partial(contexts_of_calls, *others) if others else mx.current_context
    found = first.map(inner)
    return sum(found, []) if others else found


@pytest.mark.timeout(60)
def test_maps_inside_of_maps(make_devices):
    """A context's thread runs other calls while it waits for a nested map."""
    devices, turned = make_devices(2), gluon_syncbn.Devices(cpus(3)[::-1])
    both, last = devices.contexts, make_devices(1, first=2)
    assert contexts_of_calls(devices, devices) == both * 2
    assert contexts_of_calls(devices, turned, devices) == both * 6
    assert contexts_of_calls(devices, last, turned) == turned.contexts * 2
    with pytest.raises(ZeroDivisionError):
        devices.map(lambda: turned.map(lambda: devices.map(lambda: 1 / 0)))
    assert contexts_of_calls(devices, turned) == turned.contexts * 2


@pytest.mark.timeout(60)
def test_a_thread_does_not_wait_for_ever_for_its_turn(devices):
    gluon_syncbn.set_timeout(0.2)
    begun, end = threading.Event(), threading.Event()

    def until_end():
        begun.set()
        end.wait()

    thread = threading.Thread(target=lambda: devices.map(until_end))
    thread.start()
    begun.wait()
    try:
        with pytest.raises(mx.MXNetError, match=r"0\.2 s.* map"):
            devices.map(int)
    finally:
        end.set()
        thread.join()
    assert devices.map(int) == [0, 0]


# ---- Nets in threads of their own. GLUON_SYNCBN_REPEAT=250 makes a thousand steps.


@in_threads
def trained(mode, contexts):
    """Train a net, parallel if there are contexts, and return all results."""
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


def test_a_copy_of_a_net_in_a_plain_loop_has_parameters_of_its_own():
    net, x = allow_plain_loop(nn.Dense(1, in_units=2)), nd.ones((1, 2))
    net.initialize(mx.init.One(), ctx=cpus(2))
    net(x)
    twin = ready(copy.deepcopy(net), mx.init.Zero(), force_reinit=True)
    assert net(x).asnumpy() == 2 and twin(x).asnumpy() == 0


def test_a_plain_loop_goes_on_after_the_net_has_moved():
    """The net is called twice on each context. No call cancels pending work."""
    net = ready(allow_plain_loop(nn.Dense(1, in_units=2)), ctx=cpus(2))
    number = failures.latest_recovery[0]
    for contexts in cpus(2), cpus(1):
        move(net, contexts)
        for _ in range(3):
            losses = []
            with autograd.record():
                for x in [nd.ones((1, 2), ctx=context) for context in contexts]:
                    y = net(x)
                    with autograd.pause():  # this scope begins no other loop
                        pass
                    losses.append(y + net(x))
            autograd.backward(losses)
    assert failures.latest_recovery[0] == number


@pytest.mark.parametrize("program_recovers", [False, True])
def test_a_round_that_the_program_leaves_is_cancelled(program_recovers):
    """Otherwise the next call of the second context would meet the call left behind."""
    layer = SyncBatchNorm(in_channels=1, center=False, timeout=20)
    net = ready(allow_plain_loop(layer), ctx=cpus(2))
    shards = [nd.full((1, 1), 3 * k, ctx=context) for k, context in enumerate(cpus(2))]
    number = failures.latest_recovery[0]
    with autograd.record():
        net(nd.full((1, 1), 7))
    if program_recovers:
        recover()
    for _ in range(2):
        with autograd.record():
            ys = [net(x) for x in shards]
        assert [(y.asnumpy() > 0).item() for y in ys] == [False, True]
    assert failures.latest_recovery[0] == number + 1


def test_recover_waits_for_the_turn_of_another_thread(devices):
    """Otherwise the first context of the thread's map would wait in vain."""
    layer = SyncBatchNorm(num_devices=2, in_channels=1, timeout=5)
    layer.initialize(ctx=devices.contexts)
    shards = [nd.ones((2, 1), ctx=c) for c in devices.contexts]
    begun, recovering = threading.Event(), threading.Event()

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
        assert "cpu(1)" not in str(first.exception())  # a timeout would name it
        error = threads.submit(step).exception()
        assert "gluon_syncbn.recover() in another thread" in str(error)
        number = failures.latest_recovery[0]
        threads.submit(recover).result()  # cancels nothing after that error
        assert failures.latest_recovery[0] == number
        threads.submit(step).result()
    with ThreadPoolExecutor(1) as threads:  # this thread had no error
        threads.submit(recover).result()
    assert failures.latest_recovery[0] == number + 1
    recover()  # otherwise the next test would get the error of the recovery


def noisy_net(contexts):
    """Make a net whose Dropouts wait for each other if one thread queues them all."""
    net = nn.HybridSequential()
    for _ in range(20):
        net.add(SyncBatchNorm(in_channels=2, timeout=10), nn.Dropout(0.1))
    net.initialize(ctx=contexts)
    return allow_plain_loop(net)


def test_plain_loops_that_come_to_the_contexts_in_different_orders():
    """The nets would wait for each other if they used the same threads."""
    contexts = cpus(2)
    first, second = noisy_net(contexts), noisy_net(contexts)
    calls = (first, 0), (second, 1), (first, 1), (second, 0)
    # Calls with the same input would wait for each other, so each call has its own.
    xs = [nd.random.normal(shape=(4, 2), ctx=contexts[k]) for _, k in calls]
    with autograd.train_mode():
        ys = [net(x) for (net, _), x in zip(calls, xs)]
    for y in ys:
        y.wait_to_read()
    for net in first, second:  # both contexts have the same statistics
        check_replicas(net)
        assert (net[0].running_mean.data() != 0).asnumpy().all()
