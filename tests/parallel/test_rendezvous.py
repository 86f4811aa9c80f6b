"""Errors of devices that do not arrive at an exchange, and training afterwards.

Each test makes one mistake, checks that the message names what is needed to find it,
and then trains a step whose numbers are compared with the oracle. Native tests have the
order of arrivals.
"""

import inspect
import re

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import SymbolBlock
from support.blocks import gluon_1_only
from support.helpers import cpus, put, queue_step, set_mode, train_step
from support.mistakes import (
    X,
    assert_trains,
    failure_of,
    make_layer,
    make_shards,
    map_and_wait,
)  # fmt: skip
from support.nd import nd

# ---- devices that do not arrive ------------------------------------------------------

# Each function makes a mistake with a layer, and fails in its line with "# here".


def read_before_every_context_is_called(devices, layer, shards):
    y = layer(shards[0])
    y.asnumpy()  # here


def backward_of_one_context_by_map(devices, layer, shards):
    ys = devices.map(layer, shards)
    devices.map(lambda y: y.backward() if y.context == mx.cpu(0) else None, ys)
    mx.nd.waitall()  # here


def step_without_backward_of_one_context(devices, layer, shards):
    trainer = gluon.Trainer(layer.collect_params(), "sgd")
    ys = devices.map(layer, shards)
    devices.map(lambda y: y.backward() if y.context == mx.cpu(0) else None, ys)
    trainer.step(1)  # here


MISTAKES = [
    read_before_every_context_is_called,
    backward_of_one_context_by_map,
    step_without_backward_of_one_context,
]


def line_of(function):
    """File, line and source of what a function has marked, as errors show it."""
    lines, first = inspect.getsourcelines(function)
    offset = next(k for k, line in enumerate(lines) if "# here" in line)
    return f"test_rendezvous.py:{first + offset}, in ", lines[offset].strip()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_line_that_waits(mistake, devices):
    layer = set_mode(make_layer(devices.contexts), "static_shape")
    shards = make_shards(devices)
    with autograd.train_mode():  # the graph of a hybridized layer exists
        map_and_wait(devices, layer, shards)
    with autograd.record():
        text = failure_of(mistake, devices, layer, shards)
    place, source = line_of(mistake)
    (line,) = (x for x in text.splitlines() if x.startswith("The program stands at "))
    assert place in line and line.endswith(source)
    assert text.splitlines()[-1].endswith("python -m gluon_syncbn hang")
    gluon_syncbn.recover()
    assert_trains(devices, layer)


def read(y):
    return y.asnumpy()  # here


def test_the_line_inside_of_map(devices):
    """Each thread's; its name tells the context."""
    layer = make_layer(devices.contexts)
    with autograd.train_mode():
        text = failure_of(devices.map, lambda x: read(layer(x)), make_shards(devices))
    place, source = line_of(read)
    line = rf"\nIts thread 'gluon_syncbn-cpu\(0\)' stands at .*{place}read: "
    assert re.search(line + re.escape(source), text)
    assert "cpu(1)' stands" not in text


def test_text_of_a_timeout(devices):
    """The layer does not know which two of three contexts get a shard."""
    layer = make_layer(cpus(3), num_devices=2)
    with autograd.train_mode():
        y = layer(make_shards(devices)[1])
    text = failure_of(y.asnumpy)
    assert f"SyncBatchNorm '{layer.name}', forward: waited " in text
    assert re.search(r"waited 0\.5\d* s for 1 of 2 devices", text)
    assert "Arrived: cpu(1) with shape (2, 3, 2, 5). Missing: 1 that never call" in text
    assert "call gluon_syncbn.recover()" in text
    gluon_syncbn.recover()
    assert_trains(devices, layer)


def test_layers_after_one_that_has_failed_do_not_wait(devices):
    """A hook or a print can swallow the first error."""
    first, second = (make_layer(devices.contexts) for _ in range(2))
    with autograd.train_mode():
        failure_of(first(make_shards(devices)[0]).asnumpy)
        text = failure_of(second(make_shards(devices)[0]).asnumpy)
    assert f"SyncBatchNorm '{second.name}', forward: cpu(0) stopped" in text
    assert f"earlier error: SyncBatchNorm '{first.name}', forward: waited" in text
    gluon_syncbn.recover()
    assert_trains(devices, second)


# ---- num_devices ---------------------------------------------------------------------


def test_more_devices_than_contexts(devices):
    layer = make_layer(devices.contexts, num_devices=3)
    facts = rf"'{layer.name}'.*num_devices.* 2.*cpu\(0\), cpu\(1\).* 3"
    with pytest.raises(ValueError, match=facts), autograd.train_mode():
        devices.map(layer, make_shards(devices))
    gluon_syncbn.convert_sync_batchnorm(layer, num_devices=2)
    assert_trains(devices, layer)


def test_one_device_on_two_contexts(devices):
    """Each would normalize its own shard, until backward or the next step fails."""
    layer = make_layer(devices.contexts, num_devices=1)
    words = r"num_devices must be 2 or None for a map over cpu\(0\), cpu\(1\), got 1"
    with pytest.raises(ValueError, match=words), autograd.train_mode():
        devices.map(layer, make_shards(devices))
    for context in devices.contexts:  # one after the other, as a net that moves
        with autograd.train_mode():
            (x,) = put([X], [context])
            map_and_wait(gluon_syncbn.Devices([context]), layer, [x])
    gluon_syncbn.convert_sync_batchnorm(layer, num_devices=2)
    assert_trains(devices, layer)


def test_one_shard_more_than_devices(make_devices):
    devices = make_devices(3)
    layer = make_layer(devices.contexts, num_devices=2)
    shards = make_shards(devices, X[:3])
    text = failure_of(train_step, devices, layer, shards, shards)
    assert f"SyncBatchNorm '{layer.name}'" in text
    # Any of the contexts may be the first, and the text depends on them.
    assert re.search(r"num_devices=2, but cpu\(|waited .* s for 1 of 2 devices", text)
    gluon_syncbn.recover()
    gluon_syncbn.convert_sync_batchnorm(layer, num_devices=2)
    assert_trains(make_devices(2), layer)


@gluon_1_only("blocks take no symbols")
def test_traced_before_initialization_without_num_devices():
    symbol = SyncBatchNorm(in_channels=3, prefix="norm_")(mx.sym.var("data"))
    net = SymbolBlock(symbol, mx.sym.var("data"))
    net.initialize()
    with autograd.train_mode():
        text = failure_of(net(nd.array(X)).asnumpy)
    assert "num_devices=None" in text and "give num_devices" in text


def test_backward_of_a_failed_forward_does_not_crash(make_devices):
    """MXNet runs it where another operator has taken the forward's exception."""
    devices = make_devices(3)
    layer = make_layer(devices.contexts, 0.2, num_devices=2)
    shards = make_shards(devices, X[:3])
    for _ in range(20):
        queue_step(devices, layer, shards, shards)
        gluon_syncbn.recover()
    assert_trains(make_devices(2), layer)
