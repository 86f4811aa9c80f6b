"""A process after failures: engines, exit, many errors at once, and recovery."""

import ctypes
import threading
import time

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support.helpers import cpus, output_of, run_python
from support.mistakes import assert_trains, failure_of, make_layer, make_shards

import gluon_syncbn
from gluon_syncbn import Devices, make_parallel
from gluon_syncbn.native import failures
from gluon_syncbn.parallel import bridge
from gluon_syncbn.parallel.batch import Batch

ONE_STEP = """
import sys, mxnet as mx, gluon_syncbn
count = int(sys.argv[1])
contexts = [mx.cpu(i) for i in range(count)]
layer = gluon_syncbn.SyncBatchNorm(num_devices=count)
layer.initialize(ctx=contexts)
x = [mx.nd.arange(6, ctx=c).reshape((3, 2)) for c in contexts]
with gluon_syncbn.Devices(contexts) as devices, mx.autograd.train_mode():
    ys = devices.map(layer, x)
print(ys[0].asnumpy().sum(axis=1).round().tolist())
"""


def test_naive_engine_refuses_two_devices():
    output = run_python(ONE_STEP, 2, MXNET_ENGINE_TYPE="NaiveEngine")
    assert "MXNET_ENGINE_TYPE=NaiveEngine runs one operator at a time" in output.stderr
    assert "num_devices=2" in output.stderr and output.returncode == 1


def test_naive_engine_runs_one_device():
    output = output_of(ONE_STEP, 1, MXNET_ENGINE_TYPE="NaiveEngine")
    assert output == "[-2.0, 0.0, 2.0]\n"


def test_net_moves_to_other_contexts(make_devices):
    devices = make_devices(2)
    net = nn.HybridSequential()
    net.add(make_layer(devices.contexts))
    net.hybridize(static_alloc=True, static_shape=True)
    for first in 0, 2, 4:
        moved = make_devices(2, first)
        net.collect_params().reset_ctx(moved.contexts)
        net.hybridize()
        for _ in range(3):
            assert_trains(moved, net)
    assert net[0].num_batches_tracked == 9


EXIT_WHILE_A_DEVICE_WAITS = """
import mxnet as mx, gluon_syncbn
layer = gluon_syncbn.SyncBatchNorm(num_devices=2, timeout=300)
layer.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
with mx.autograd.train_mode():
    y = layer(mx.nd.ones((2, 3)))
print("leaves")
"""


def test_exit_while_a_device_waits_is_prompt():
    assert output_of(EXIT_WHILE_A_DEVICE_WAITS) == "leaves\n"


MANY_ERRORS = """
import mxnet as mx, gluon_syncbn
contexts = [mx.cpu(i) for i in range(4)]
layer = gluon_syncbn.SyncBatchNorm(in_channels=3, timeout=20)
layer.initialize(ctx=contexts)
good = [mx.nd.ones((2, 3), ctx=c) for c in contexts]
bad = good[:3] + [good[3].astype("float64")]
devices = gluon_syncbn.Devices(contexts)
texts = 0
with mx.autograd.train_mode():
    for _ in range(200):
        ys = devices.map(layer, bad)
        for y in ys:
            try:
                y.wait_to_read()
            except mx.MXNetError as error:
                texts += "devices disagree" in str(error)
        gluon_syncbn.recover()
    ys = devices.map(layer, good)
print(texts >= 200, [float(y.sum().asscalar()) for y in ys])
"""


def test_all_devices_throw_at_once_many_times():
    assert output_of(MANY_ERRORS, timeout=120) == "True [0.0, 0.0, 0.0, 0.0]\n"


MANY_RECOVERIES = """
import mxnet as mx, gluon_syncbn
contexts = [mx.cpu(i) for i in range(4)]
net = mx.gluon.nn.HybridSequential()
for _ in range(4):
    net.add(gluon_syncbn.SyncBatchNorm(in_channels=3))
net.initialize(ctx=contexts)
devices = gluon_syncbn.Devices(contexts)
xs = [mx.nd.ones((2, 3), ctx=c) for c in contexts]
with mx.autograd.train_mode():
    for _ in range(1000):
        devices.map(net, xs)
        gluon_syncbn.recover()
    print([float(y.sum().asscalar()) for y in devices.map(net, xs)])
"""


def test_errors_of_all_devices_do_not_race_in_mxnets_list_of_them():
    assert output_of(MANY_RECOVERIES, timeout=200) == "[0.0, 0.0, 0.0, 0.0]\n"


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


def test_an_error_stays_with_its_operator():
    """A healthy operator that completes meanwhile does not take it."""
    contexts = cpus(2, 1)  # who waits for an array does it on cpu(0)
    good, bad = (make_layer(contexts, num_devices=2) for _ in range(2))
    xs = [mx.nd.ones((2, 3), ctx=c) for c in contexts]
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
        assert "devices disagree" in failure_of(y.wait_to_read)


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
    """Of a user's function, whose own operator completes later. Ours is not taken."""
    contexts = cpus(2, 1)
    elsewhere = mx.nd.ones((2, 3), ctx=mx.cpu(5))
    elsewhere.attach_grad()
    layer, fails = make_layer(contexts, num_devices=2), Fails()
    good, other = (mx.nd.ones((2, 3), ctx=context) for context in contexts)
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
    assert "devices disagree" in failures.failure()
    gluon_syncbn.recover()
    with Devices(contexts) as devices:
        assert_trains(devices, layer)


def test_error_of_the_users_function_gives_up_the_work_in_flight(devices):
    layer = make_layer(devices.contexts, num_devices=2, timeout=1000)

    def step(x):
        if x.context == mx.cpu(1):
            raise KeyError("a user's mistake")
        return layer(x)

    with pytest.raises(KeyError, match="a user's mistake"), autograd.record():
        devices.map(step, make_shards(devices))
    assert_trains(devices, layer)


def test_recover_without_a_failure_does_no_harm():
    with Devices(cpus(2)) as devices:
        layer = make_layer(devices.contexts)
        assert_trains(devices, layer)
        gluon_syncbn.recover()
        assert_trains(devices, layer)


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_outlive_the_function_that_got_them(count, fails):
    """MXNet frees their memory when it returns or raises."""
    rows = 2 * count
    x = mx.nd.ones((rows, 3))
    x.attach_grad()
    with autograd.record():
        batch = Batch([x], cpus(count), 0, [])
    ((_, shards),) = batch.differentiable
    gate = bridge.Gate(batch)
    gate.attach(None, [shards])
    memory = np.ones((rows, 3), "float32")

    def run():
        dy = mx.nd.from_numpy(memory[:])  # makes its view read-only, not `memory`
        try:
            gate.backward([dy])
        except mx.MXNetError:
            assert fails
        memory[:] = np.nan

    thread = threading.Thread(target=run)
    thread.start()
    bridge.await_any([gate], failures.latest_recovery)
    with BusyWorker(mx.cpu(0)):
        collected = gate.collect({})
        if fails:
            gate.cancel(RuntimeError("in the caller"))
        else:
            gate.deliver([shards])
        thread.join()
    for (dy,) in collected:
        np.testing.assert_array_equal(dy.asnumpy(), 1)


def test_recovery_in_another_thread_ends_a_backward(devices):
    """Its own error was dropped, so nothing would ever arrive."""
    fails = Fails()

    def recover():
        fails.began.wait(60)
        fails.go_on.set()
        gluon_syncbn.recover("another thread's reason")

    net = make_parallel(nn.Dense(1, in_units=3), devices.contexts)
    net.initialize()
    x = mx.nd.ones((4, 3))
    x.attach_grad()
    thread = threading.Thread(target=recover)
    thread.start()
    with autograd.record():
        loss = fails(net(x))
    assert "another thread's reason" in failure_of(loss.backward)
    thread.join()
