"""A process forks and exits without a hang while work of ours is in flight.

MXNet's exit and fork handlers stop the threads of custom operators before they wait for
work, see src/mxnet/fork.cc and failures.py.
"""

import pytest
from support.helpers import run_python

SETUP = """
import os, sys
import mxnet as mx, gluon_syncbn
from mxnet import autograd
from mxnet.gluon import nn

contexts = [mx.cpu(0), mx.cpu(1)]
net = nn.HybridSequential()
for _ in range(8):
    net.add(nn.Conv2D(16, 3, padding=1), nn.BatchNorm())
gluon_syncbn.convert_sync_batchnorm(net, 2)
net.initialize(ctx=contexts)
net.hybridize(static_alloc=True, static_shape=True)
devices = gluon_syncbn.Devices(contexts)
x = mx.nd.random.normal(shape=(4, 3, 24, 24))

def push_step():
    with autograd.record():
        ys = devices.map(net, devices.split(x))
    devices.map(lambda y: y.backward(), ys)
"""


def run(body, timeout=120):
    """The output and the errors of a program that ends so; it has to succeed."""
    options = {"GLUON_SYNCBN_TIMEOUT": "60", "PYTHONFAULTHANDLER": "1"}
    process = run_python(SETUP + body, timeout=timeout, **options)
    assert process.returncode == 0, process.stderr
    return process.stdout, process.stderr


@pytest.mark.parametrize("body", ["pass", "del net", "sys.exit(0)"])
def test_exit_with_a_step_in_flight(body):
    _, errors = run(f"push_step(); {body}; print('last line')")
    assert "MXNetError" not in errors


def test_exit_with_a_device_that_waits_in_vain():
    body = """
net.hybridize()
push_step()  # the first one is waited for
with autograd.record():
    y = devices.map(lambda x: net(x) if x is not None else None, [x, None])
print('last line')
"""
    output, errors = run(body, timeout=50)  # less than the layer's own timeout
    assert "last line" in output
    assert "MXNetError" not in errors


# Both are called while others wait, which have less than 8 seconds.
IN_A_LAYER = """
def late(x):
    if mx.current_context() == contexts[1]:
        stop()
    return net(x)

with autograd.record():
    ys = devices.map(late, devices.split(x))
devices.map(lambda y: y.backward(), ys)
"""
IN_A_BACKWARD = """
class Late(autograd.Function):
    def forward(self, y):
        return y.copy()

    def backward(self, dy):
        stop()
        return dy

net = gluon_syncbn.make_parallel(net, contexts)
x.attach_grad()  # its gradient is what backward has to wait for
with autograd.record():
    loss = Late()(net(x)).sum()
loss.backward()
"""


@pytest.mark.parametrize("body", [IN_A_LAYER, IN_A_BACKWARD])
def test_time_in_a_stopped_process_does_not_count(body):
    begin = """
import subprocess
gluon_syncbn.set_timeout(6)
push_step()  # the first one is waited for
mx.nd.waitall()

def stop():
    kill = 'sleep 0.5; kill -STOP $PPID; sleep 8; kill -CONT $PPID'
    subprocess.run(['sh', '-c', kill], close_fds=False)
"""
    output, _ = run(begin + body + "mx.nd.waitall(); print('finished')")
    assert "finished" in output


def test_forks_with_steps_in_flight():
    body = """
for step in range(20):
    push_step()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
mx.nd.waitall()
print('steps', net[1].num_batches_tracked)
"""
    output, _ = run(body)
    assert "steps 20" in output


def test_a_fork_waits_for_what_another_thread_queues():
    body = """
import threading
gluon_syncbn.set_timeout(5)
layer = gluon_syncbn.SyncBatchNorm(num_devices=2)
layer.initialize(ctx=contexts)
begins = threading.Event()
os.register_at_fork(before=begins.set)  # runs before the package's

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
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
thread.join()
mx.nd.waitall()
"""
    _, errors = run(body)
    assert "before a fork" not in errors  # where an error of the layer would be dropped


def test_subprocess_and_data_loader_workers_beside_training():
    body = """
import subprocess
data = mx.gluon.data.ArrayDataset(mx.nd.random.normal(shape=(16, 3, 24, 24)))
rows = 0
for epoch in range(2):
    push_step()
    for batch in mx.gluon.data.DataLoader(data, 4, num_workers=2):
        x = batch
        push_step()
        subprocess.run(['true'], check=True)
        rows += len(batch)
mx.nd.waitall()
print('rows', rows)
"""
    output, _ = run(body)
    assert "rows 32" in output


def test_failure_before_a_fork_is_not_lost():
    body = """
net.hybridize()
push_step()  # the first one is waited for
mx.nd.waitall()
gluon_syncbn.set_timeout(1)
with autograd.record():
    y = devices.map(lambda x: net(x) if x is not None else None, [x, None])
child = os.fork()
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
try:
    push_step()
except mx.MXNetError as error:
    print('raised', 'Missing: cpu(1)' in str(error))
push_step()
mx.nd.waitall()
print('continued')
"""
    output, _ = run(body)
    assert "raised True" in output
    assert "continued" in output


def test_a_library_that_is_missing_is_said_once(tmp_path):
    path = tmp_path / "none.so"
    result = run_python("import gluon_syncbn", GLUON_SYNCBN_LIBRARY=str(path))
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1, result.stderr
    assert result.stderr.splitlines()[-1].startswith(f"ImportError: {path} does not")
