"""Monitor and available_contexts: what a user asks about the devices."""

import re
import threading
import time
from functools import partial
from pathlib import Path

import gluon_syncbn
from gluon_syncbn import Monitor, make_parallel

import mxnet as mx
from mxnet.gluon import Trainer, nn
from support.helpers import differentiate, run_tool
from support.nd import nd

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
    """Train a small net and report; making a batch takes `rest` seconds."""
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

    monitor = Monitor(net)
    for x in monitor.data(batches()):
        differentiate(lambda x: (net(x) ** 2).sum(), x).wait_to_read()
        trainer.step(4)
    mx.nd.waitall()
    return net, monitor.report()


def read(report):
    """Return the shares of each device and the end of a report, its steps and hint."""
    *rows, last = report.split("\n")[1:]
    shares = {row.split()[0]: re.findall(r"(\d+)%", row) for row in rows}
    return {name: [int(n) / 100 for n in row] for name, row in shares.items()}, last


# The shares are of time that a sleep makes up for, however slow the machine is: in each
# run a device sleeps, or waits for one that does, in at least so many seconds.


def slept(last):
    """Return the share of the time that 8 sleeps take."""
    return 8 * SLOW / float(re.search("in (.*) s:", last).group(1))


def test_waiting_for_data(devices):
    _, report = watched_run(devices, rest=SLOW)
    shares, last = read(report)
    assert last.startswith("8 steps") and "all wait for data" in last
    assert all(for_data > 0.5 * slept(last) for for_data, *_ in shares.values())


def test_waiting_for_a_slow_device_names_it_and_the_layer(devices):
    net, report = watched_run(devices, is_slow=True)
    shares, last = read(report)
    (_, fast, in_layer), (_, slow, *_) = shares.values()
    assert fast == in_layer > 0.5 * slept(last) > slow
    assert last.endswith(f"devices wait for cpu(1), most of all in {net[2].name}")


def test_a_busy_device_does_not_wait_for_data(monkeypatch):
    """The loop waits for each batch, but the device ends its step only after that."""
    may_end = threading.Semaphore(0)
    monkeypatch.setattr(Slow, "rest", may_end.acquire)
    net = nn.Sequential()
    net.add(slow_block(), nn.Dense(1, in_units=1))
    net.initialize(ctx=mx.cpu(1))
    x = nd.ones((2, 1), mx.cpu(1))
    monitor = Monitor(net)
    for number, _ in enumerate(monitor.data(range(4))):
        if number > 0:
            may_end.release()
        if number == 1:
            mx.nd.waitall()
            assert "1 steps" in monitor.report()
        differentiate(net, x)
    may_end.release()
    mx.nd.waitall()
    shares, last = read(monitor.report())
    assert last.startswith("3 steps") and shares["cpu(1)"] == [0, 0]


# ---- contexts ------------------------------------------------------------------------


def test_without_cuda_there_is_the_cpu():
    assert gluon_syncbn.available_contexts() == [mx.cpu(0)]


DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int* n) { *n = 2; return 0; }
"""


def test_the_driver_counts_in_another_process(tmp_path, monkeypatch):
    """The driver is made for the test."""
    code = tmp_path / "cuda.c"
    code.write_text(DRIVER)
    run_tool("gcc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", code)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with_cuda = mx.runtime.Features
    monkeypatch.setattr(with_cuda, "is_enabled", lambda self, name: name == "CUDA")
    assert gluon_syncbn.available_contexts() == [mx.gpu(0), mx.gpu(1)]
    assert "libcuda" not in Path("/proc/self/maps").read_text()
