"""Monitor and available_contexts: what a user asks about the devices."""

import re
import time
from contextlib import ExitStack
from pathlib import Path

from gluon_syncbn import Monitor, available_contexts, make_parallel

import mxnet as mx
from mxnet.gluon import Trainer, nn
from support.helpers import busy_worker, differentiate, ready, run_tool
from support.nd import nd

SLOW = 0.05  # seconds


def slow_on_one_device(x):
    if x.context == mx.cpu(1):
        time.sleep(SLOW)
    return x * 1


def batches(pause=0.0):
    for _ in range(8):
        time.sleep(pause)
        yield nd.random.normal(shape=(4, 3))


def read(report):
    *rows, last = report.split("\n")[1:]
    return [[int(n) / 100 for n in re.findall(r"(\d+)%", row)] for row in rows], last


def watched_run(devices, first, pause=0.0):
    """Train a small net on batches that take `pause` seconds; return facts of a report.

    The last fact is the share of a device that waits for 8 sleeps of SLOW seconds.
    """
    net = nn.Sequential()
    net.add(first, nn.Dense(4, in_units=3), nn.BatchNorm(), nn.Dense(2))
    make_parallel(net, devices.contexts).initialize()
    trainer, monitor = Trainer(net.collect_params(), "sgd"), Monitor(net)
    for x in monitor.data(batches(pause)):
        differentiate(lambda x: (net(x) ** 2).sum(), x).wait_to_read()
        trainer.step(4)
    shares, last = read(monitor.report())
    seconds = float(re.search("in (.*) s:", last).group(1))
    return net[2].name, shares, last, 8 * SLOW / seconds


def test_waiting_for_data(devices):
    _, shares, last, slept = watched_run(devices, nn.Flatten(), pause=SLOW)
    assert last.startswith("8 steps") and "all wait for data" in last
    assert all(for_data > 0.5 * slept for for_data, *_ in shares)


def test_waiting_for_a_slow_device_names_it_and_the_layer(devices):
    name, shares, last, slept = watched_run(devices, nn.Lambda(slow_on_one_device))
    (_, fast, in_layer), (_, slow, *_) = shares
    assert fast == in_layer > 0.5 * slept > slow
    assert last.endswith(f"devices wait for cpu(1), most of all in {name}")


def test_a_busy_device_does_not_wait_for_data():
    """The loop waits for each batch while the device is still busy."""
    net, busy = ready(nn.Dense(1, in_units=3), ctx=mx.cpu(1)), ExitStack()
    monitor = Monitor(net)
    for number, x in enumerate(monitor.data(batches(SLOW))):
        if number == 0:
            monitor.report()  # forgets the wait for the first batch
        busy.close()
        busy.enter_context(busy_worker(mx.cpu(1)))
        differentiate(net, x.as_in_context(mx.cpu(1)))
    busy.close()
    mx.nd.waitall()
    assert read(monitor.report())[0] == [[0, 0]]


DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int* n) { *n = 2; return 0; }
"""


def test_gpus_are_counted_in_another_process(tmp_path, monkeypatch):
    assert available_contexts() == [mx.cpu(0)]
    (tmp_path / "cuda.c").write_text(DRIVER)
    file = tmp_path / "libcuda.so.1"
    run_tool("gcc", "-shared", "-fPIC", "-o", file, tmp_path / "cuda.c")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    features = mx.runtime.Features
    monkeypatch.setattr(features, "is_enabled", lambda self, name: name == "CUDA")
    assert available_contexts() == [mx.gpu(0), mx.gpu(1)]
    assert "libcuda" not in Path("/proc/self/maps").read_text()
