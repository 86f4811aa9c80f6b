"""A process forks and exits without a hang while operators of the layer are pending."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

from gluon_syncbn.native import interrupts

import pytest
from support.helpers import run_python

SETUP = """
import os, signal, subprocess, sys, threading
import gluon_syncbn, mxnet as mx
from mxnet import autograd
from mxnet.gluon import nn
from support.helpers import ready
from support.nd import nd

contexts = [mx.cpu(0), mx.cpu(1)]
net = nn.HybridSequential()
for _ in range(8):
    net.add(nn.Conv2D(16, 3, padding=1), nn.BatchNorm())
gluon_syncbn.convert_sync_batchnorm(net, 2)
net.initialize(ctx=contexts)
net.hybridize(static_alloc=True, static_shape=True)
devices = gluon_syncbn.Devices(contexts)
x = nd.random.normal(shape=(4, 3, 24, 24))

def push_step():
    with autograd.record():
        ys = devices.map(net, devices.split(x))
    devices.map(lambda y: y.backward(), ys)

def push_call_of_one_device():
    net.hybridize()
    push_step()  # each device must have called the layer to be named in errors
    mx.nd.waitall()
    with autograd.record():
        return devices.map(lambda x: net(x) if x is not None else None, [x, None])

def fork(in_child=lambda: None):
    child = os.fork()
    if child == 0:
        in_child()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""

PROGRAMS = {
    "a graph is deleted while the GIL is held": """
import ctypes, gc, weakref
from gluon_syncbn.mxnet_private import tape
from gluon_syncbn.parallel import recorded_call

net = ready(gluon_syncbn.make_parallel(nn.Dense(1, in_units=3), contexts))
calls, library = [], tape._LIB
record = library.MXCustomFunctionRecord
library.MXCustomFunctionRecord = lambda *args: calls.append(args[-1]) or record(*args)
with autograd.record():
    loss = net(nd.ones((4, 3)))
callbacks = calls[0]._obj
(owner,) = map(weakref.ref, list(recorded_call._calls.values()))
# Functions of PyDLL hold the GIL, like os.fork.
library, thread = ctypes.PyDLL(None), ctypes.c_ulong()
deletes = ctypes.cast(callbacks.callbacks, ctypes.POINTER(ctypes.c_void_p))[1]
argument = ctypes.c_void_p(callbacks.contexts[1])
created = library.pthread_create(
    ctypes.byref(thread), None, ctypes.c_void_p(deletes), argument
)
assert created == 0 and library.pthread_join(thread, None) == 0
devices.map(int)
gc.collect()
assert owner() is None
""",
    "no map begins after the exit handlers": """
import atexit
begun, end = threading.Event(), threading.Event()

def loop():
    try:
        while True:
            devices.map(lambda: begun.set() or end.is_set() and os._exit(1))
    except mx.MXNetError:
        pass

thread = threading.Thread(target=loop, daemon=True)
thread.start()
begun.wait()
atexit._run_exitfuncs()
end.set()
thread.join(1)  # the thread gets an error, or waits for its turn
os._exit(print('done', flush=True) or 0)
""",
    "a first call does not disturb a wait of another thread": """
layer = ready(gluon_syncbn.SyncBatchNorm())
errors, end = [], threading.Event()

def wait():
    while not end.is_set():
        try:
            mx.nd.waitall()
        except mx.MXNetError as error:
            errors.append(error)

thread = threading.Thread(target=wait)
thread.start()
with autograd.train_mode():
    layer(nd.ones((2, 3))).asnumpy()
end.set()
thread.join()
assert not errors, errors[0]
""",
    "signals after all descriptors were closed": """
layer = gluon_syncbn.SyncBatchNorm()
os.closerange(3, 4096)
files = [open(f'{sys.argv[1]}/{n}', 'w') for n in range(20)]
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.raise_signal(signal.SIGUSR1)
assert not any(os.path.getsize(file.name) for file in files)
os._exit(print('done', flush=True) or 0)
""",
    # The wait for the late device is longer than a worker of the engine stays awake.
    "a late device, and a fork": """
from support.helpers import status

layer = ready(gluon_syncbn.SyncBatchNorm(in_channels=1), ctx=contexts)
big = nd.ones((800, 800), ctx=contexts[1])

def forward(x):
    if x.context == contexts[1]:
        x = x + 0 * nd.dot(big, big)[0, 0]
    with autograd.record():
        return layer(x)

def train():
    shards = devices.split(nd.array([[1.0], [3.0]]))
    return [y.asnumpy().item() for y in devices.map(forward, shards)]

results = train(), train()
before = status('Threads')
for _ in range(20):
    train()
fork(lambda: train() == results[0] or os._exit(1))
assert results[0] == results[1] == train()
assert status('Threads') - before <= 2
""",
    "no threads": """
import resource
make = lambda: gluon_syncbn.SyncBatchNorm(num_devices=2, timeout=1)
first, second = (ready(make(), ctx=contexts) for _ in range(2))
with autograd.train_mode():
    devices.map(first, devices.split(x))  # starts all threads but the second spare one
    devices.map(second, devices.split(x))
    mx.nd.waitall()
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)  # root has no limit
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    ys = first(x), second(x)
for y in ys:
    try:
        y.wait_to_read()
    except mx.MXNetError as error:
        assert 'Missing: cpu(1)' in str(error), error
    else:
        raise AssertionError
os._exit(print('done', flush=True) or 0)
""",
    "exit while a device waits in vain": "push_step(); y = push_call_of_one_device()",
    "exit after an error in a loss's backward": """
# One core makes it likely that the interpreter ends while MXNet's threads run.
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])

class Fails(autograd.Function):
    def forward(self, y):
        return y * 1
    def backward(self, dy):
        raise RuntimeError("mine")

def fail():
    net = ready(gluon_syncbn.make_parallel(nn.Dense(1, in_units=3), contexts))
    with autograd.record():
        loss = Fails()(net(nd.ones((4, 3))))
    try:
        loss.backward()
        mx.nd.waitall()
    except mx.MXNetError:
        return loss

for _ in range(3):
    child = os.fork()
    if child == 0:
        loss = fail()
        sys.exit(0 if loss is not None else "no error")
    assert os.waitpid(child, 0)[1] == 0
""",
    # The layer would time out if the thread could not queue its call during the fork.
    "fork while another thread queues": """
gluon_syncbn.set_timeout(5)
layer = ready(gluon_syncbn.SyncBatchNorm(num_devices=2), ctx=contexts)
begins = threading.Event()
os.register_at_fork(before=begins.set)  # runs before gluon_syncbn's handler

def call(shard):
    with autograd.train_mode():
        layer(shard)

def call_late(shard):
    begins.wait()
    call(shard)

first, second = devices.split(x)
call(first)
thread = threading.Thread(target=call_late, args=(second,))
thread.start()
fork()
thread.join()
mx.nd.waitall()
""",
    "a failure before a fork is not lost": """
gluon_syncbn.set_timeout(1)
y = push_call_of_one_device()
fork()
try:
    push_step()
except mx.MXNetError as error:
    assert 'Missing: cpu(1)' in str(error)
else:
    sys.exit('no error')
gluon_syncbn.recover()
push_step()
mx.nd.waitall()
y = push_call_of_one_device()
# Now subprocess calls fork, whose C handler waits for `y` while the GIL is held.
subprocess._USE_VFORK = False
subprocess.run(['true'], check=True)
gluon_syncbn.recover()
""",
    "a forked child makes its own threads": """
def in_child():
    assert devices.map(int) == [0, 0]

devices.map(int)
begun, end = threading.Event(), threading.Event()
thread = threading.Thread(target=devices.map, args=(lambda: begun.set() or end.wait(),))
thread.start()
begun.wait()
fork(in_child)
end.set()
thread.join()
assert devices.map(int) == [0, 0]

def interrupt():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return
    os._exit(1)

signal.signal(signal.SIGINT, signal.default_int_handler)
devices.map(lambda: fork(interrupt))  # map defers signals, but not in a child
""",
}


def run(body, *arguments):
    """Run a program that has to succeed; return its standard error."""
    options = {"GLUON_SYNCBN_TIMEOUT": "60", "PYTHONFAULTHANDLER": "1"}
    program = f"{SETUP}{body}\nprint('done')"
    process = run_python(program, *arguments, timeout=50, **options)
    assert process.returncode == 0, process.stderr
    assert process.stdout.endswith("done\n")
    return process.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_exits_and_forks(name, tmp_path):
    errors = run(PROGRAMS[name], tmp_path)
    is_printed = "before a fork: " in errors
    assert is_printed == name.startswith("a failure before a fork")
    # MXNet's error texts begin with "MXNetError" since version 1.7.
    assert "MXNetError" not in errors.replace("before a fork: MXNetError", "")


WITHOUT_A_LAYER = """
import gluon_syncbn, mxnet as mx
from support.nd import nd
net = gluon_syncbn.make_parallel(mx.gluon.nn.Dense(1), [mx.cpu(0), mx.cpu(1)])
net.initialize()
with mx.autograd.record():
    net(nd.ones((2, 1)))
"""


def test_exit_after_a_recorded_call_without_backward():
    """This program once aborted in 11 of 18 runs."""
    with ThreadPoolExecutor(2) as threads:
        for process in threads.map(run_python, [WITHOUT_A_LAYER] * 4):
            assert process.returncode == 0, process.stderr


CTRL_C_ELSEWHERE = """
import time
signal.signal(signal.SIGINT, signal.default_int_handler)
make = lambda: gluon_syncbn.SyncBatchNorm(num_devices=2, timeout=40)
first = threading.Thread(target=make)
first.start()
first.join()

def interrupted():
    layer = ready(make(), ctx=contexts)
    with autograd.train_mode():
        y = layer(x)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    try:
        y.wait_to_read()
    except (KeyboardInterrupt, mx.MXNetError):
        assert time.monotonic() - begin < 20  # half of the timeout
    try:
        gluon_syncbn.recover()
    except KeyboardInterrupt:
        pass

interrupted()
fork(interrupted)
"""

CTRL_C = """
import time

def press():
    time.sleep(10.5)
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
ys = push_call_of_one_device()
threading.Thread(target=press).start()
try:
    mx.nd.waitall()
except KeyboardInterrupt:
    gluon_syncbn.recover()
else:
    sys.exit('no interrupt')
del ys
push_step()
mx.nd.waitall()
"""


STOPPED = """
import time
gluon_syncbn.set_timeout(3)
push_step()  # later calls do not trace the net
mx.nd.waitall()

def late(x):
    if mx.current_context() == contexts[1]:  # while cpu(0) waits
        stop = 'sleep 0.5; kill -STOP $PPID; sleep 4; kill -CONT $PPID'
        # close_fds=False avoids a fork, whose handler would first wait for cpu(0).
        subprocess.run(['/bin/sh', '-c', stop], close_fds=False)
        time.sleep(1)  # 1.5 s without the stop
    return net(x)

with autograd.train_mode():
    devices.map(late, devices.split(x))
mx.nd.waitall()
"""


def test_waits_of_some_seconds():
    """Ctrl-C ends a wait. The timeout excludes time in which a process is stopped."""
    with ThreadPoolExecutor(2) as threads:
        errors, *_ = threads.map(run, [CTRL_C, STOPPED, CTRL_C_ELSEWHERE])
    assert errors.count("Missing: cpu(1)") == 1
    assert "gluon_syncbn raises this error after 60 s:" in errors


STATUS = """
def finish():  # the other device calls once the status was printed
    os.kill(os.getpid(), signal.SIGUSR1)
    text = b''
    while b'The program stands at' not in text:
        text += os.read(read, 4096)
    os.write(stderr, text)
    with autograd.train_mode():
        layer(second)

layer = ready(gluon_syncbn.SyncBatchNorm(num_devices=2), ctx=contexts)
first, second = devices.split(x)
with autograd.train_mode():
    for _ in range(12):
        devices.map(layer, [first, second])
    mx.nd.waitall()
    y = layer(first)
stderr, (read, write) = os.dup(2), os.pipe()
os.dup2(write, 2)
threading.Thread(target=finish).start()
y.wait_to_read()
"""


def test_a_signal_prints_who_is_missing_and_the_latest_exchanges(monkeypatch):
    monkeypatch.setenv("GLUON_SYNCBN_STATUS", "1")
    text, number = run(STATUS), (SETUP + STATUS).count("\n")
    assert "pending exchanges: 1\n" in text
    assert "Missing: cpu(1).\n" in text  # no advice follows
    assert max(line.count("forward ") for line in text.splitlines()) == 10
    assert f"The program stands at <string>:{number}\n" in text


@pytest.mark.parametrize(
    "shows, number", [(False, signal.SIGUSR1), (True, signal.SIGUSR2)]
)
def test_other_signals_print_nothing(shows, number, monkeypatch, capfd):
    monkeypatch.setattr(interrupts, "_SHOWS_STATUS", shows)
    read, write = os.pipe()
    os.write(write, bytes([number]))
    os.close(write)
    interrupts._listen(read)
    assert capfd.readouterr().err == ""


def test_a_renumbered_descriptor_is_closed():
    descriptors = os.pipe()
    for descriptor in map(interrupts._renumbered, descriptors):
        os.close(descriptor)
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.close(descriptor)
