"""Devices: shards, order, threads, flags, and errors that leave it usable."""

import decimal
import os
import signal
import threading
import time
import traceback
import weakref

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from support.helpers import cpus, output_of, whole

import gluon_syncbn
from gluon_syncbn import Devices


@pytest.mark.parametrize(
    "rows, count, shards",
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (3, 3, [1, 1, 1]), (8, 3, [3, 3, 2]), (7, 1, [7])],
)
def test_split_gives_the_first_contexts_one_row_more(rows, count, shards, make_devices):
    devices = make_devices(count)
    batch = np.arange(rows * 2).reshape(rows, 2).astype("float32")
    parts = devices.split(mx.nd.array(batch))
    assert [len(part) for part in parts] == shards
    assert [part.context for part in parts] == devices.contexts
    assert (whole(parts) == batch).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "uint8"])
def test_split_keeps_the_dtype_of_numpy_arrays(dtype, devices):
    parts = devices.split(np.arange(5).astype(dtype))
    assert [part.dtype for part in parts] == [np.dtype(dtype)] * 2
    assert [list(part.asnumpy()) for part in parts] == [[0, 1, 2], [3, 4]]


def test_split_along_another_axis(devices):
    parts = devices.split(mx.nd.arange(6).reshape((2, 3)), batch_axis=1)
    assert [part.shape for part in parts] == [(2, 2), (2, 1)]


def test_split_is_not_recorded(devices):
    x = mx.nd.arange(4)
    x.attach_grad()
    with autograd.record():
        parts = devices.split(x)
        for part in parts:
            part.attach_grad()
        ys = devices.map(lambda part: part * 3, parts)
    devices.map(lambda y: y.backward(), ys)
    assert [list(part.grad.asnumpy()) for part in parts] == [[3, 3], [3, 3]]
    assert (x.grad.asnumpy() == 0).all()


def test_map_calls_in_order_with_the_elements_of_each_context(make_devices):
    devices, seen = make_devices(3), []

    def note(a, b):
        seen.append((a, b))
        return a + b

    assert devices.map(note, [1, 2, 3], b"abc") == [98, 100, 102]
    assert seen == [(1, 97), (2, 98), (3, 99)]


def test_each_context_has_one_thread_of_its_own(make_devices):
    devices = make_devices(3)
    first = devices.map(threading.get_ident)
    assert devices.map(threading.get_ident) == first
    assert len({*first, threading.get_ident()}) == 4


def test_the_context_is_current_in_the_call(devices):
    assert devices.map(mx.current_context) == devices.contexts


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_flags_of_the_caller_hold_inside(recording, training, devices):
    scope = autograd.record if recording else autograd.pause
    for _ in range(2):  # nothing of one call may stay in the threads
        with scope(train_mode=training):
            assert devices.map(autograd.is_recording) == [recording] * 2
            assert devices.map(autograd.is_training) == [training] * 2
        assert devices.map(autograd.is_recording) == [False, False]


def test_numpy_semantics_of_the_caller_hold_inside(devices):
    with mx.util.np_shape(True), mx.util.np_array(True):
        assert devices.map(mx.util.is_np_array) == [True, True]
        assert devices.map(mx.util.is_np_shape) == [True, True]
    assert devices.map(mx.util.is_np_array) == [False, False]


def test_an_exception_reaches_the_caller_with_its_traceback(devices):
    def my_faulty_function(x):
        if x == 2:
            raise KeyError("mine")
        return x

    with pytest.raises(KeyError, match="mine") as caught:
        devices.map(my_faulty_function, [1, 2])
    frames = "".join(traceback.format_tb(caught.value.__traceback__))
    assert "my_faulty_function" in frames
    assert devices.map(lambda x: x * 2, [1, 2]) == [2, 4]


class Late:
    """Delays the calls of other functions, as a busy machine does."""

    def __init__(self, calls, function):
        self._calls, self._function = calls, function

    def get(self):
        return self._calls.get()

    def put(self, item):
        late = item[1] is not self._function
        threading.Timer(0.5 * late, self._calls.put, [item]).start()


def test_a_thread_without_a_call_is_ready_whenever_it_runs_next(devices, monkeypatch):
    gluon_syncbn.set_timeout(0.1)

    def fail():
        raise ZeroDivisionError

    for worker in devices._workers:
        monkeypatch.setattr(worker, "_calls", Late(worker._calls, fail))
    with pytest.raises(ZeroDivisionError):
        devices.map(fail)
    assert devices.map(int) == [0, 0]


@pytest.fixture
def handle():
    """Sets the handler of Ctrl-C, which a program of the background ignores."""
    former = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, former)


def interrupting(seen):
    """A function to map that presses Ctrl-C in its first call."""

    def function(x):
        seen.append(x)
        if len(seen) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)  # the main thread runs its handler while this one rests
        return x

    return function


def test_ctrl_c_waits_until_every_context_was_called(devices, handle):
    seen = []
    handle(signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        devices.map(interrupting(seen), [1, 2])
    assert seen == [1, 2]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert devices.map(abs, [-1, -2]) == [1, 2]


def test_second_ctrl_c_is_immediate(devices, handle):
    seen, handled = [], threading.Event()

    def handler(signum, frame):
        if not handled.is_set():
            handled.set()
            raise KeyboardInterrupt

    def press(x):
        seen.append(x)
        while not handled.is_set():  # signals may be merged
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    handle(handler)
    with pytest.raises(KeyboardInterrupt):
        devices.map(press, [1, 2])
    assert seen == [1]
    assert signal.getsignal(signal.SIGINT) is handler
    assert devices.map(abs, [-1, -2]) == [1, 2]


def test_ctrl_c_calls_the_handler_of_the_program(devices, handle):
    seen, noted = [], []
    handle(lambda signum, frame: noted.append(signum))
    assert devices.map(interrupting(seen), [1, 2]) == [1, 2]
    assert noted == [signal.SIGINT]


def test_first_step_of_a_static_graph_is_waited_for(devices):
    layer = gluon_syncbn.SyncBatchNorm(num_devices=2, timeout=0.5)
    layer.initialize(ctx=devices.contexts)
    layer.hybridize(static_alloc=True, static_shape=True)
    xs = devices.split(mx.nd.random.normal(shape=(4, 3)))
    with autograd.record():
        with pytest.raises(mx.MXNetError, match=r"Missing: cpu\(1\)"):
            devices.map(lambda x: layer(x) if x is not None else x, [xs[0], None])
        ys = devices.map(layer, xs)
    assert abs(whole(ys).mean(0)).max() < 1e-6


def test_the_first_contexts_alone(make_devices):
    devices = make_devices(3)
    seen = devices.map_first(lambda a, b: (a, b, mx.current_context()), [1, 2], "ab")
    assert seen == [(1, "a", mx.cpu(0)), (2, "b", mx.cpu(1))]


def test_closed_devices_say_so():
    devices = Devices(cpus(2))
    with devices:
        assert len(devices) == 2
    devices.close()
    with pytest.raises(ValueError, match="closed"):
        devices.map(lambda: None)


# ---- nested calls, and calls of several threads --------------------------------------


def nest_directly(devices, other):
    return devices.map(lambda: devices.map(int))


def nest_in_another_one(devices, other):
    return devices.map(lambda: other.map(lambda: devices.map(int)))


def nest_in_the_first_contexts(devices, other):
    return devices.map_first(lambda x: devices.map_first(int, [x]), [1])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "nest", [nest_directly, nest_in_another_one, nest_in_the_first_contexts]
)
def test_map_inside_of_map(nest, devices, make_devices):
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"map was called inside of .*cpu\(1\)"):
            nest(devices, make_devices(1))
        assert devices.map(abs, [-1, -2]) == [1, 2]


@pytest.mark.parametrize("first", [0, 2])
def test_map_of_other_devices_inside_of_map(first, devices, make_devices):
    inner = make_devices(2, first)
    layer = gluon_syncbn.SyncBatchNorm(num_devices=2)
    layer.initialize(ctx=inner.contexts)
    shards = inner.split(mx.nd.array([[0.0], [2.0]]))
    for _ in range(3):
        with autograd.train_mode():
            outer = devices.map(lambda: inner.map(layer, shards))
        for ys in outer:
            values = [y.asnumpy().item() for y in ys]
            assert values == pytest.approx([-1, 1], abs=1e-4)


def test_threads_take_turns(devices):
    seen, threads = [], []

    def begin_another(x):
        seen.append(x)
        if x == "a":
            thread = threading.Thread(target=devices.map, args=(seen.append, "cd"))
            threads.append(thread)
            thread.start()
            time.sleep(0.02)  # without turns it would be next

    for _ in range(20):
        devices.map(begin_another, "ab")
        threads.pop().join()
    assert "".join(seen) == "abcd" * 20


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


STUCK = """
import os, signal, threading, time
import mxnet as mx, gluon_syncbn

gluon_syncbn.set_timeout(1)
begun, handled = threading.Event(), threading.Event()

def handler(signum, frame):
    if not handled.is_set():
        handled.set()
        raise KeyboardInterrupt

def press():
    begun.wait()
    while not handled.is_set():  # signals may be merged
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)

def never_ends():
    begun.set()
    while True:
        time.sleep(0.01)

signal.signal(signal.SIGINT, handler)
threading.Thread(target=press).start()
devices = gluon_syncbn.Devices([mx.cpu(0), mx.cpu(1)])
try:
    devices.map(never_ends)
except KeyboardInterrupt:
    print("interrupted")
try:
    devices.map(int)
except RuntimeError as error:
    print(error)
devices.close()
with gluon_syncbn.Devices(devices.contexts) as others:
    print(others.map(int))
"""


def test_a_function_that_never_ends_can_be_left():
    interrupted, error, others = output_of(STUCK).splitlines()
    assert interrupted == "interrupted" and others == "[0, 0]"
    assert error.startswith("the function that map called for cpu(0)")


FORKED = """
import os
import mxnet as mx, gluon_syncbn
devices = gluon_syncbn.Devices([mx.cpu(0)])
gluon_syncbn.Devices([mx.cpu(0)]).close()  # its thread is not the child's either
child = os.fork()
if child == 0:
    try:
        devices.map(int)
    except RuntimeError as error:
        print(error)
    print(gluon_syncbn.Devices([mx.cpu(0)]).map(int), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(devices.map(int))
"""


def test_a_forked_child_makes_devices_of_its_own():
    error, child, parent = output_of(FORKED).splitlines()
    assert error.startswith("Devices([cpu(0)]) were made in a parent process")
    assert child == parent == "[0]"


# ---- threads of closed Devices -------------------------------------------------------


def test_threads_are_used_again_but_not_shared():
    with Devices(cpus(2)) as devices:
        first = devices.map(threading.get_ident)
        with Devices(cpus(2)) as beside:
            assert not set(first) & set(beside.map(threading.get_ident))
    with Devices(cpus(1, first=1)) as devices:
        (ident,) = devices.map(threading.get_ident)
    del devices
    with Devices(cpus(1, first=1)):
        dropped = Devices(cpus(1, first=1))
        (other,) = dropped.map(threading.get_ident)
        del dropped
        with Devices(cpus(1, first=1)) as devices:
            assert devices.map(threading.get_ident) == [other] != [ident]


MANY = """
import sys, threading
import mxnet as mx, gluon_syncbn
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


@pytest.mark.parametrize("use", [("devices", 5, 1000), ("parallel_net", 10, 101)])
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
    autograd.set_recording(True)
    autograd.set_training(True)
    mx.util.set_np(True, True)
    mx.engine.set_bulk_size(7)
    mx.cpu(3).__enter__()
    mx.name.Prefix("mine_").__enter__()
    np.seterr(all="ignore")
    decimal.getcontext().prec = 3
    local.mine = 1


def traces():
    """The state that belongs to a thread."""
    bulk_size = mx.engine.set_bulk_size(0)
    mx.engine.set_bulk_size(bulk_size)
    return (
        autograd.is_recording(),
        autograd.is_training(),
        mx.util.is_np_shape(),
        mx.util.is_np_array(),
        bulk_size,
        mx.current_context(),
        (mx.sym.var("x") + 1).name,
        mx.gluon.nn.Dense(1).name,
        np.geterr(),
        decimal.getcontext().prec,
        hasattr(local, "mine"),
        mx.nd.random.uniform(shape=3).asnumpy().tolist(),
        mx.nd.random.poisson(3, shape=3).asnumpy().tolist(),
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


def test_results_do_not_live_in_the_threads(devices):
    class Result:
        pass

    results = [weakref.ref(result) for result in devices.map(Result)]
    assert [result() for result in results] == [None, None]


def test_contexts_are_not_changed_by_their_use(devices):
    """A Context notes whom it replaces, and is the same object for all who use it."""
    with mx.cpu(3):
        with devices.contexts[0]:
            devices.map(int)
        assert mx.current_context() == mx.cpu(3)


def test_a_context_alone_and_the_name_of_several():
    assert Devices(mx.cpu(3)).contexts == [mx.cpu(3)]
    assert repr(Devices(cpus(2))) == "Devices([cpu(0), cpu(1)])"
