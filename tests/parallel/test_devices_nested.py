"""Calls of Devices.map inside of one another, and from several threads in turns."""

import threading

import gluon_syncbn

import mxnet as mx
import pytest
from mxnet import autograd
from support.parallel_nets import column, dense, weight_gradient


def call_a_parallel_net(devices, other):
    net = dense(devices.contexts)
    net.devices.map(lambda: net(column(1, 2)))


def call_its_backward(devices, other):
    net, x = dense(devices.contexts), column(1, 2)
    x.attach_grad()
    with autograd.record():
        total = net(x).sum()
    net.devices.map(total.backward)


NESTS = [
    lambda devices, other: devices.map(lambda: devices.map(int)),
    lambda devices, other: devices.map(lambda: other.map(lambda: devices.map(int))),
    lambda devices, other: devices.map_first(
        lambda x: devices.map_first(int, [x]), [1]
    ),
    call_a_parallel_net,
    call_its_backward,
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("nest", NESTS)
def test_map_inside_of_map(nest, devices, make_devices):
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"map was called inside of .*cpu\(1\)"):
            nest(devices, make_devices(1))
        assert devices.map(abs, [-1, -2]) == [1, 2]


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
        with pytest.raises(mx.MXNetError, match="waited 0.2 s for the map of another"):
            devices.map(int)
    finally:
        end.set()
        thread.join()
    assert devices.map(int) == [0, 0]


def in_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()


def test_a_thread_learns_that_another_one_gave_up_its_work(make_devices):
    devices, others = make_devices(2), make_devices(2)
    devices.map(int)

    def fail():
        with pytest.raises(ZeroDivisionError):
            others.map(lambda: 1 / 0)
        assert others.map(int) == [0, 0]

    in_thread(fail)
    with pytest.raises(mx.MXNetError, match="was given up by another thread.*Division"):
        devices.map(int)
    assert devices.map(int) == [0, 0]
    in_thread(gluon_syncbn.recover)
    in_thread(devices.map, int)  # a thread that had nothing in flight
    assert devices.map(int) == [0, 0]
