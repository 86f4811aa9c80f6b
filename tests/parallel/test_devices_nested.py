"""Calls of Devices.map inside of one another, and from several threads in turns."""

import threading
from functools import partial

import gluon_syncbn
from gluon_syncbn import make_parallel

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import Trainer, nn
from support.helpers import cpus, differentiate, values
from support.parallel_nets import column, dense, weight_gradient


def contexts_of_calls(*chain):
    """Return the contexts that the functions of nested maps are called on."""
    first, *others = chain
    inner = partial(contexts_of_calls, *others) if others else mx.current_context
    found = first.map(inner)
    return sum(found, []) if others else found


@pytest.mark.timeout(60)
def test_maps_inside_of_maps(make_devices):
    """Each context has one thread, which may wait for another that calls it again."""
    devices, turned = make_devices(2), gluon_syncbn.Devices(cpus(3)[::-1])
    both, last = devices.contexts, make_devices(1, first=2)
    assert contexts_of_calls(devices, devices) == both * 2
    assert contexts_of_calls(devices, turned, devices) == both * 6
    assert contexts_of_calls(devices, last, turned) == turned.contexts * 2
    with pytest.raises(ZeroDivisionError):
        devices.map(lambda: turned.map(lambda: devices.map(lambda: 1 / 0)))
    assert contexts_of_calls(devices, turned) == turned.contexts * 2


def test_backward_inside_of_the_map_of_its_own_devices(devices):
    net, x = dense(devices.contexts), column(1, 2)
    with autograd.record():
        total = net(x).sum()
    backward = [total.backward, lambda: None]
    devices.map(lambda call: call(), backward)
    assert weight_gradient(net) == 3


def test_a_parallel_net_gets_shards_inside_of_the_map_of_its_devices(devices):
    net, x = dense(devices.contexts, 3.0), column(1, 2)
    with autograd.record():
        totals = devices.map(lambda x: net(x).sum(), devices.split(x))
    assert [y.context for y in totals] == devices.contexts
    devices.map(lambda y: y.backward(), totals)
    assert weight_gradient(net) == 3


@pytest.mark.parametrize("attach", [True, False])
def test_a_parallel_net_inside_of_the_map_of_others(attach, devices, make_devices):
    net, x = dense(devices.contexts, 2.0), column(1, 2)
    if attach:
        x.attach_grad()
    with autograd.record():
        (total,) = make_devices(1).map(lambda: (net(x) ** 2).sum())
    make_devices(1).map(total.backward)
    assert weight_gradient(net) == 2 * 2 * 1 + 2 * 4 * 2
    assert not attach or (x.grad.asnumpy()[:, 0] == [8, 16]).all()


@pytest.mark.timeout(60)
def test_a_thread_does_not_wait_for_ever_for_its_turn(devices):
    gluon_syncbn.set_timeout(0.2)
    begun, end = threading.Event(), threading.Event()

    def until_told():
        begun.set()
        end.wait()

    thread = threading.Thread(target=lambda: devices.map(until_told))
    thread.start()
    begun.wait()
    try:
        with pytest.raises(mx.MXNetError, match=r"0\.2 s.* map"):
            devices.map(int)
    finally:
        end.set()
        thread.join()
    assert devices.map(int) == [0, 0]


def in_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()


def test_a_step_whose_backward_another_thread_gave_up_updates_nothing(make_devices):
    """MXNet drops errors of gradients, so gradients of an earlier step would stay."""
    net, x = nn.HybridSequential(), column(1, 2, 5)
    net.add(nn.Dense(1), nn.BatchNorm())
    make_parallel(net, cpus(2)).initialize()
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})

    def fail():
        with pytest.raises(ZeroDivisionError):
            make_devices(1, first=2).map(lambda: 1 / 0)

    for failing in False, True, False:
        differentiate(lambda x: net(x) ** 2, x)
        before = values(net)
        if failing:
            in_thread(fail)
            with pytest.raises(mx.MXNetError, match="another"):
                trainer.step(3)
        else:
            trainer.step(3)
        assert all(map(np.array_equal, values(net), before)) == failing


def test_a_thread_learns_that_another_one_gave_up_its_work(make_devices):
    devices, others = make_devices(2), make_devices(2)
    devices.map(int)

    def fail():
        with pytest.raises(ZeroDivisionError):
            others.map(lambda: 1 / 0)
        assert others.map(int) == [0, 0]

    in_thread(fail)
    with pytest.raises(mx.MXNetError, match="another.*Division"):
        devices.map(int)
    assert devices.map(int) == [0, 0]
    gluon_syncbn.recover()
    assert devices.map(int) == [0, 0]  # it knows
    in_thread(devices.map, int)  # a thread that had nothing in flight
