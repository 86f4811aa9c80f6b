"""Monitor, check_replicas, available_contexts: what a user asks about the devices."""

import threading
import time
from functools import partial

import gluon_syncbn
from gluon_syncbn import Monitor, check_replicas, make_parallel

import mxnet as mx
import pytest
from mxnet.gluon import Trainer, nn
from support.helpers import cpus, differentiate, run_python, run_tool
from support.nd import nd
from support.parallel_nets import dense

SLOW = 0.05  # seconds


class Slow(mx.operator.CustomOp):
    """The identity; its forward rests on cpu(1)."""

    rest = partial(time.sleep, SLOW)
    rests = False

    def forward(self, is_train, req, in_data, out_data, aux):
        if self.rests:
            Slow.rest()
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0])


@mx.operator.register("slow_on_one_device")
class SlowProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        operator = Slow()
        operator.rests = "cpu(1)" in str(ctx)
        return operator


def slow_block():
    return nn.Lambda(partial(nd.Custom, op_type="slow_on_one_device"))


def watched_run(devices, is_slow=False, rest=0.0):
    """Trains a small net and reports; a batch takes `rest` seconds to make."""
    net = nn.Sequential()
    net.add(nn.Dense(4, in_units=3))
    if is_slow:
        net.add(slow_block())
    net.add(nn.BatchNorm(), nn.Dense(2))
    net = make_parallel(net, devices.contexts)
    net.initialize()
    trainer = Trainer(net.collect_params(), "sgd")

    def batches():
        for _ in range(8):
            time.sleep(rest)
            yield nd.random.normal(shape=(4, 3))

    with Monitor(net) as monitor:
        for x in monitor.data(batches()):
            loss = differentiate(lambda x: (net(x) ** 2).sum(), x)
            trainer.step(4)
            loss.wait_to_read()
        mx.nd.waitall()
        return net, monitor.report()


# The shares are of time that a sleep makes up for, however slow the machine is: in each
# run a device sleeps, or waits for one that does, in at least so many seconds.


def test_waiting_for_data(devices):
    _, waits = watched_run(devices, rest=SLOW)
    assert waits.steps == 8
    assert waits.data * waits.seconds > 0.5 * 8 * SLOW
    assert waits.hint.startswith("devices wait for data")


def test_waiting_for_each_other_names_the_layer(devices):
    net, waits = watched_run(devices, is_slow=True)
    # One of two devices waits for the other.
    assert waits.each_other * waits.seconds > 0.5 * 8 * SLOW / 2
    ((name, share),) = waits.layers
    assert name == net[2].name and share == pytest.approx(waits.each_other)
    assert waits.hint.startswith(f"devices wait for each other, most of all in {name}")


def test_a_busy_device_does_not_wait_for_data(monkeypatch):
    """The loop waits for each batch, but the device ends its step only after that."""
    may_end = threading.Semaphore(0)
    monkeypatch.setattr(Slow, "rest", may_end.acquire)
    net = nn.Sequential()
    net.add(slow_block(), nn.Dense(1, in_units=1))
    net.initialize(ctx=mx.cpu(1))
    x = nd.ones((2, 1), mx.cpu(1))
    with Monitor(net) as monitor:
        for number, _ in enumerate(monitor.data(range(4))):
            if number > 0:
                may_end.release()
            if number == 1:
                mx.nd.waitall()
                assert monitor.report().steps == 1
            differentiate(net, x)
        may_end.release()
        mx.nd.waitall()
        waits = monitor.report()
    assert (waits.steps, waits.data) == (3, 0)


def test_outside_of_its_block(devices):
    monitor = Monitor(dense(devices.contexts))
    with pytest.raises(RuntimeError, match="Monitor.report was called before .* wi"):
        monitor.report()
    with monitor:
        pass
    assert monitor.report().steps == 0
    with pytest.raises(RuntimeError, match="Monitor.data was called after .* with"):
        monitor.data([])


# ---- replicas ------------------------------------------------------------------------


def test_trainer_that_was_made_before_the_net_was_moved(devices):
    weights = []
    for is_moved in False, True:
        net = dense(None)
        trainer = Trainer(net.collect_params(), "sgd")
        if is_moved:
            make_parallel(net, devices.contexts, reset_ctx=True)
        train_twice(net, trainer)
        check_replicas(net)
        weights.append(net.weight.list_data()[0].asnumpy())
    assert (weights[0] == weights[1]).all()


def train_twice(net, trainer):
    for _ in range(2):
        differentiate(net, nd.array([[1], [2]]))
        trainer.step(2)


@pytest.mark.parametrize("count, kvstore", [(1, None), (2, "device")])
def test_trainer_that_needs_no_warning(count, kvstore, recwarn):
    net = dense(cpus(count))
    train_twice(net, Trainer(net.collect_params(), "sgd", kvstore=kvstore))
    assert not [w for w in recwarn if "trainer of this net" in str(w.message)]


# ---- contexts ------------------------------------------------------------------------


def test_without_cuda_there_is_the_cpu():
    assert gluon_syncbn.available_contexts() == [mx.cpu(0)]


COUNT = """
import os, sys
from gluon_syncbn.tools import contexts
import mxnet as mx
os.environ["LD_LIBRARY_PATH"] = sys.argv[1]  # of the processes that are started
contexts._SECONDS = int(sys.argv[2])
mx.runtime.Features.is_enabled = lambda self, name: name == "CUDA"
found = contexts.available_contexts()
with open("/proc/self/maps") as maps:
    assert "libcuda" not in maps.read()
print(found)
"""
DRIVER = """
#include <unistd.h>
int cuInit(unsigned flags) { return %s; }
int cuDeviceGetCount(int* n) { *n = 2; return 0; }
"""


@pytest.mark.parametrize(
    "init, patience, expected",
    [
        ("0", 60, "[gpu(0), gpu(1)]"),
        ("sleep(1000)", 2, "TimeoutExpired"),
    ],
)
def test_the_driver_counts_in_another_process(init, patience, expected, tmp_path):
    """With a driver made for the test."""
    code = tmp_path / "cuda.c"
    code.write_text(DRIVER % init)
    run_tool("gcc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", code)
    result = run_python(COUNT, tmp_path, patience)
    assert expected in result.stdout + result.stderr
