"""Threads of Devices: used again like new ones, never shared."""

import decimal
import threading

import mxnet as mx
import pytest
from support.helpers import cpus, output_of

from gluon_syncbn import Devices


def test_threads_are_used_again_but_not_shared():
    with Devices(cpus(2)) as devices:
        first = devices.map(threading.get_ident)
        assert devices.map(threading.get_ident) == first
        with Devices(cpus(2)) as beside:
            others = beside.map(threading.get_ident)
        assert len({*first, *others, threading.get_ident()}) == 5
    with Devices(cpus(1, first=1)) as devices:
        (ident,) = devices.map(threading.get_ident)
        dropped = Devices(cpus(1, first=1))
        (other,) = dropped.map(threading.get_ident)
        del dropped
        with Devices(cpus(1, first=1)) as devices:
            assert devices.map(threading.get_ident) == [other] != [ident]


MANY = """
import sys, threading
import gluon_syncbn, mxnet as mx
from support.helpers import cpus, differentiate, status

def devices():
    with gluon_syncbn.Devices(cpus(2)) as devices:
        xs = devices.split(mx.nd.ones((2, 1)))
        devices.map(lambda x: mx.nd.Dropout(x + 1, mode="always").wait_to_read(), xs)
    return status("Threads")

def parallel_net():
    net = gluon_syncbn.make_parallel(mx.gluon.nn.BatchNorm(), cpus(2))
    net.initialize()
    differentiate(net, mx.nd.ones((4, 3)))
    mx.nd.waitall()
    return threading.active_count()  # MXNet makes others, as many as are at work

use, few, many = globals()[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
for number in range(1, many + 1):
    threads = use()
    if number in (few, many):
        print(status("VmRSS"), threads)
"""


# The few come after MXNet has made its threads, which cost 5 MB each.
@pytest.mark.parametrize("use", [("devices", 5, 200), ("parallel_net", 30, 70)])
def test_many_cost_no_more_than_a_few(use):
    output = output_of(MANY, *use, timeout=200)
    few, many = (line.split() for line in output.splitlines())
    assert int(many[0]) - int(few[0]) < 16 * 1024, output
    assert many[1] == few[1]


local = threading.local()


def dirty():
    """Leaves traces of all kinds in the thread that calls it."""
    mx.random.seed(5)
    mx.nd.random.uniform()
    mx.engine.set_bulk_size(7)
    mx.cpu(3).__enter__()
    decimal.getcontext().prec = 3
    local.mine = 1


def traces():
    """The state that belongs to a thread."""
    bulk_size = mx.engine.set_bulk_size(0)
    mx.engine.set_bulk_size(bulk_size)
    return (
        bulk_size,
        mx.current_context(),
        decimal.getcontext().prec,
        hasattr(local, "mine"),
        mx.nd.random.uniform(shape=3).asnumpy().tolist(),
        mx.nd.Dropout(mx.nd.ones(20), mode="always").asnumpy().tolist(),
    )


def test_a_thread_that_is_used_again_is_like_a_new_one():
    context = cpus(1, first=7)  # of no other test
    with Devices(context) as devices:
        new, again = devices.map(lambda: (traces(), traces()))[0]
        assert new[-1] != again[-1]  # random numbers
        devices.map(dirty)
        (ident,) = devices.map(threading.get_ident)
    with Devices(context) as devices:
        assert devices.map(threading.get_ident) == [ident]
        (result,) = devices.map(traces)
    assert result == new
