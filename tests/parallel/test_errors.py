"""Errors in training with a layer on several devices, and right steps after them."""

import inspect
import re
import threading
import time

import gluon_syncbn
from gluon_syncbn import Devices, SyncBatchNorm
from gluon_syncbn.native import failures

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import SymbolBlock
from support.blocks import gluon_1_only
from support.helpers import (
    X,
    assert_trains,
    busy_worker,
    cpus,
    differentiate,
    failure_of,
    make_layer,
    ready,
    run_python,
    set_mode,
)
from support.nd import nd

# ---- devices that do not arrive ------------------------------------------------------

# Each function makes a mistake with a layer, and fails in its line with "# here".


def read_before_the_second_call(devices, layer, shards):
    y = layer(shards[0])
    y.asnumpy()  # here


def backward_of_one_context_by_map(devices, layer, shards):
    ys = devices.map(layer, shards)
    devices.map(lambda y: y.backward() if y.context == mx.cpu(0) else None, ys)
    mx.nd.waitall()  # here


def line_of(function):
    """Return file, line and source of the line with "# here", as errors show them."""
    lines, first = inspect.getsourcelines(function)
    offset = next(k for k, line in enumerate(lines) if "# here" in line)
    return f"test_errors.py:{first + offset}, in ", lines[offset].strip()


@pytest.mark.parametrize(
    "mistake", [read_before_the_second_call, backward_of_one_context_by_map]
)
def test_the_line_that_waits(mistake, devices):
    layer = set_mode(make_layer(devices.contexts), "static_shape")
    shards = devices.split(X)
    with autograd.train_mode():
        devices.map(layer, shards)  # makes the layer's graph
    mx.nd.waitall()
    with autograd.record():
        text = failure_of(mistake, devices, layer, shards)
    assert f"SyncBatchNorm '{layer.name}', " in text and "recover()" in text
    assert "Arrived: cpu(0) with shape (2, 3, 2, 5). Missing: cpu(1). " in text
    place, source = line_of(mistake)
    (line,) = (x for x in text.splitlines() if x.startswith("The program stands at "))
    assert place in line and line.endswith(source)
    assert text.splitlines()[-1].endswith("python -m gluon_syncbn hang")
    gluon_syncbn.recover()
    assert_trains(devices, layer)


def read(y):
    return y.asnumpy()  # here


def test_the_line_inside_of_map(devices):
    """The error has the name and the line of the thread that waits."""
    layer = make_layer(devices.contexts)
    with autograd.train_mode():
        text = failure_of(devices.map, lambda x: read(layer(x)), devices.split(X))
    place, source = line_of(read)
    line = rf"\nIts thread 'gluon_syncbn-cpu\(0\)' stands at .*{place}read: "
    assert re.search(line + re.escape(source), text)
    assert "cpu(1)' stands" not in text


# ---- num_devices ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "count, facts",
    [
        (3, r"'{}'.*num_devices.* 2.*cpu\(0\), cpu\(1\).* 3"),
        (1, r"num_devices must be 2 or None for .*cpu\(0\), cpu\(1\), got 1"),
    ],
)
def test_another_number_of_devices_than_contexts(count, facts, devices):
    layer = make_layer(devices.contexts, num_devices=count)
    with pytest.raises(ValueError, match=facts.format(layer.name)):
        with autograd.train_mode():
            devices.map(layer, devices.split(X))
    gluon_syncbn.convert_sync_batchnorm(layer, num_devices=2)
    assert_trains(devices, layer)


@gluon_1_only("blocks of Gluon 2 take no symbols")
def test_traced_before_initialization_without_num_devices():
    symbol = SyncBatchNorm(in_channels=3, prefix="norm_")(mx.sym.var("data"))
    net = ready(SymbolBlock(symbol, mx.sym.var("data")))
    with autograd.train_mode():
        text = failure_of(net(nd.array(X)).asnumpy)
    assert "num_devices=None" in text and "give num_devices" in text


# ---- engines, moved nets, and errors of several operators at once

NAIVE = """
import gluon_syncbn, mxnet as mx
from support.helpers import ready
from support.nd import nd
for count in 1, 2:
    contexts = [mx.cpu(i) for i in range(count)]
    layer = ready(gluon_syncbn.SyncBatchNorm(num_devices=count), ctx=contexts)
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


@pytest.mark.filterwarnings("ignore:SyncBatchNorm .*allow_plain_loop")
def test_an_error_stays_with_its_operator():
    """A good layer does not get the error of a bad layer that fails meanwhile."""
    contexts = cpus(2, 1)  # not cpu(0), whose worker is needed for wait_to_read
    good, bad = (make_layer(contexts, num_devices=2) for _ in range(2))
    xs = [nd.ones((2, 3), ctx=c) for c in contexts]
    x = xs[0].copy()
    mx.nd.waitall()
    with autograd.train_mode():
        failing, healthy = bad(x), good(xs[0])
        for _ in range(2):  # twice, because the layers convert their inputs first
            with busy_worker(contexts[0]):
                pass  # the worker has done all work that was queued before
        with busy_worker(contexts[0]):
            good(xs[1]).wait_to_read()  # both devices of `good` have arrived
            other = bad(xs[1].astype("float64"))
            while not failures.failure():
                time.sleep(0.01)
            time.sleep(0.2)  # meanwhile the failed operator gives MXNet its error
    np.testing.assert_array_equal(healthy.asnumpy(), 0)
    for y in failing, other:
        assert "float64" in failure_of(y.wait_to_read)


class Fails(autograd.Function):
    """A function whose backward waits for an event, and raises."""

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
def test_recovery_after_mxnet_mixed_up_two_errors():
    """MXNet gives a layer's operator the error of a user's function, not its own."""
    contexts = cpus(2, 1)
    x = nd.ones((2, 3), ctx=mx.cpu(5))
    x.attach_grad()
    layer, fails = make_layer(contexts, num_devices=2), Fails()
    good, other = (nd.ones((2, 3), ctx=context) for context in contexts)
    differentiate(fails, x)
    assert fails.began.wait(60)
    with busy_worker(mx.cpu(5)):
        fails.go_on.set()
        time.sleep(0.2)  # meanwhile MXNet stores the function's error
        with autograd.train_mode():
            layer(good), layer(other.astype("float64"))
        while not failures.failure():
            time.sleep(0.01)
    assert "float64" in failures.failure()
    gluon_syncbn.recover()
    devices = Devices(contexts)
    assert_trains(devices, layer)
