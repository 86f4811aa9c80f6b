"""A process after failures: engines, many errors at once, and recovery."""

import ctypes
import threading
import time

import gluon_syncbn
from gluon_syncbn import Devices
from gluon_syncbn.native import failures

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support.blocks import move
from support.helpers import cpus, run_python
from support.mistakes import assert_trains, failure_of, make_layer, make_shards
from support.nd import nd

NAIVE = """
import gluon_syncbn, mxnet as mx
from support.nd import nd
for count in 1, 2:
    contexts = [mx.cpu(i) for i in range(count)]
    layer = gluon_syncbn.SyncBatchNorm(num_devices=count)
    layer.initialize(ctx=contexts)
    x = [nd.arange(6, ctx=c).reshape((3, 2)) for c in contexts]
    with mx.autograd.train_mode():
        ys = gluon_syncbn.Devices(contexts).map(layer, x)
    print(ys[0].asnumpy().sum(axis=1).round().tolist())
"""


def test_naive_engine_runs_one_device_and_refuses_two():
    result = run_python(NAIVE, MXNET_ENGINE_TYPE="NaiveEngine")
    assert result.stdout == "[-2.0, 0.0, 2.0]\n" and result.returncode == 1
    assert "MXNET_ENGINE_TYPE=NaiveEngine" in result.stderr
    assert "num_devices=2" in result.stderr


def test_net_moves_to_other_contexts(make_devices):
    devices = make_devices(2)
    net = nn.HybridSequential()
    net.add(make_layer(devices.contexts))
    net.hybridize(static_alloc=True, static_shape=True)
    for first in 0, 2, 4:
        moved = make_devices(2, first)
        move(net, moved.contexts)
        net.hybridize()
        for _ in range(3):
            assert_trains(moved, net)


class BusyWorker:
    """Keeps the engine's worker of a CPU context busy, as a bulk does on a GPU."""

    def __init__(self, context):
        self._began, self._end = threading.Event(), threading.Event()
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
        self._work = function(self._run)
        self._context = (ctypes.c_int * 2)(context.device_typeid, context.device_id)

    def _run(self, _context, _parameter):
        self._began.set()
        self._end.wait(60)

    def __enter__(self):
        push = mx.base._LIB.MXEnginePushSync
        nothing = None, 0, None, 0, None, 0, b"busy"
        mx.base.check_call(push(self._work, None, None, self._context, *nothing))
        assert self._began.wait(60)

    def __exit__(self, *exception):
        self._end.set()


@pytest.mark.filterwarnings("ignore:SyncBatchNorm .*allow_plain_loop")
def test_an_error_stays_with_its_operator():
    """A healthy operator that completes meanwhile does not take it."""
    contexts = cpus(2, 1)  # who waits for an array does it on cpu(0)
    good, bad = (make_layer(contexts, num_devices=2) for _ in range(2))
    xs = [nd.ones((2, 3), ctx=c) for c in contexts]
    x = xs[0].copy()
    mx.nd.waitall()  # the worker has nothing queued but what is counted below
    with autograd.train_mode():
        failing, healthy = bad(x), good(xs[0])
        for _ in range(2):  # the guard that makes x plain, then the operators
            with BusyWorker(contexts[0]):
                pass
        with BusyWorker(contexts[0]):
            good(xs[1]).wait_to_read()  # both have arrived
            other = bad(xs[1].astype("float64"))
            while not failures.failure():
                time.sleep(0.01)
            time.sleep(0.2)  # the error leaves its operator meanwhile
    np.testing.assert_array_equal(healthy.asnumpy(), 0)
    for y in failing, other:
        assert "float64" in failure_of(y.wait_to_read)


class Fails(autograd.Function):
    """Its backward waits for an event, and raises."""

    def __init__(self):
        super().__init__()
        self.began, self.go_on = threading.Event(), threading.Event()

    def forward(self, x):
        return x * 1

    def backward(self, dy):
        self.began.set()
        self.go_on.wait(60)
        raise RuntimeError("mine")


@pytest.mark.timeout(60)
def test_an_operator_completes_with_the_error_of_another_one():
    """The other one is a user's function that completes later. Ours is not taken."""
    contexts = cpus(2, 1)
    elsewhere = nd.ones((2, 3), ctx=mx.cpu(5))
    elsewhere.attach_grad()
    layer, fails = make_layer(contexts, num_devices=2), Fails()
    good, other = (nd.ones((2, 3), ctx=context) for context in contexts)
    with autograd.record():
        y = fails(elsewhere)
    y.backward()
    assert fails.began.wait(60)
    with BusyWorker(mx.cpu(5)):
        fails.go_on.set()
        time.sleep(0.2)  # the error leaves its operator meanwhile
        with autograd.train_mode():
            layer(good), layer(other.astype("float64"))
        while not failures.failure():
            time.sleep(0.01)
    assert "float64" in failures.failure()
    gluon_syncbn.recover()
    devices = Devices(contexts)
    assert_trains(devices, layer)


def test_error_of_the_users_function_gives_up_the_work_in_flight(devices):
    layer = make_layer(devices.contexts, num_devices=2, timeout=1000)

    def my_faulty_step(x):
        if x.context == mx.cpu(1):
            raise KeyError("a user's mistake")
        return layer(x)

    with pytest.raises(KeyError, match="a user's mistake") as caught:
        with autograd.record():
            devices.map(my_faulty_step, make_shards(devices))
    assert caught.traceback[-1].name == "my_faulty_step"
    assert_trains(devices, layer)
