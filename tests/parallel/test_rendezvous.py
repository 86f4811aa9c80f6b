"""Errors of devices that do not arrive at a rendezvous, and training afterwards.

Each test makes one mistake, checks that the message names what is needed to find it,
and then trains a step whose numbers are compared with the oracle. Native tests have the
order of arrivals.
"""

import re

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

import mxnet as mx
import pytest
from mxnet import autograd
from mxnet.gluon import SymbolBlock
from support.helpers import cpus, queue_step, set_mode, train_step
from support.mistakes import (
    X,
    assert_trains,
    cause_of,
    failure_of,
    make_layer,
    make_shards,
    map_and_wait,
)  # fmt: skip

# ---- devices that do not arrive ------------------------------------------------------

# Each function makes a mistake with a layer; what it returns raises the failure.


def read_before_every_context_is_called(devices, layer, shards):
    return layer(shards[0]).asnumpy


def read_inside_of_map(devices, layer, shards):
    return lambda: devices.map(lambda x: layer(x).asnumpy(), shards)


def context_that_skips_the_layer(devices, layer, shards):
    ys = devices.map(lambda x: x if x.context == mx.cpu(1) else layer(x), shards)
    return ys[0].asnumpy


def template_of_a_parallel_net(devices, layer, shards):
    gluon_syncbn.make_parallel(layer, devices.contexts, sync_bn=False)
    return layer(shards[0]).asnumpy


def backward_of_one_context(devices, layer, shards):
    gluon_syncbn.allow_plain_loop(layer)
    ys = [layer(x) for x in shards]
    ys[0].backward()
    return layer.gamma.grad(mx.cpu(0)).asnumpy


def backward_of_one_context_by_map(devices, layer, shards):
    ys = devices.map(layer, shards)
    devices.map(lambda y: y.backward() if y.context == mx.cpu(0) else None, ys)
    return layer.gamma.grad(mx.cpu(0)).asnumpy


CAUSES = {
    read_before_every_context_is_called: (
        "the net was not called for cpu(1). In training call it for every cont"
    ),
    read_inside_of_map: (
        "the function that is called for cpu(0) waits for a result (asnumpy, wa"
    ),
    context_that_skips_the_layer: (
        "the function that Devices.map calls did not call the layer for cpu(1) in"
    ),
    template_of_a_parallel_net: (
        "the call went to the template of a parallel net, its attribute net. Call"
    ),
    backward_of_one_context: (
        "backward was not called for cpu(1). Call autograd.backward once, with the"
    ),
    backward_of_one_context_by_map: (
        "backward was not called for cpu(1) from Devices.map. Call it there"
    ),
}


@pytest.mark.parametrize("mistake", CAUSES)
def test_likely_cause(mistake, devices):
    layer = set_mode(make_layer(devices.contexts), "static_shape")
    shards = make_shards(devices)
    with autograd.train_mode():  # the graph of a hybridized layer exists
        map_and_wait(devices, layer, shards)
    with autograd.record():
        fails = mistake(devices, layer, shards)
        assert cause_of(fails).startswith(CAUSES[mistake])
    gluon_syncbn.recover()
    assert_trains(devices, layer)


def test_a_context_used_twice_in_a_step(devices):
    layer = make_layer(devices.contexts)
    first, second = make_shards(devices)
    with autograd.train_mode():
        layer(first)
        y = layer(second.as_in_context(mx.cpu(0)))
    expected = "cpu(0) got a second shard before cpu(1) got one. Give every context"
    assert cause_of(y.asnumpy).startswith(expected)


def test_more_contexts_than_shards(devices):
    layer = make_layer(cpus(3))
    with autograd.train_mode():
        ys = devices.map(layer, make_shards(devices))
    expected = "the layer is initialized on cpu(2), which got no shard. Initialize the"
    assert cause_of(ys[0].asnumpy).startswith(expected)
    gluon_syncbn.recover()
    gluon_syncbn.convert_sync_batchnorm(layer, num_devices=2)
    assert_trains(devices, layer)


def test_text_of_a_timeout(devices):
    """Of a layer that does not know which two of three contexts get a shard."""
    layer = make_layer(cpus(3), num_devices=2)
    with autograd.train_mode():
        y = layer(make_shards(devices)[1])
    text = failure_of(y.asnumpy)
    assert f"SyncBatchNorm '{layer.name}', forward: waited " in text
    assert re.search(r"waited 0\.5\d* s for 1 of 2 devices", text)
    assert "Arrived: cpu(1) with shape (2, 3, 2, 5). Missing: 1 that never call" in text
    assert "num_devices=2 is not the number of contexts that get a shard" in text
    assert "; the layer is initialized on cpu(0), cpu(1), cpu(2)." in text
    assert "call gluon_syncbn.recover()" in text
    gluon_syncbn.recover()
    assert_trains(devices, layer)


# ---- num_devices ---------------------------------------------------------------------


def test_more_devices_than_contexts(devices):
    layer = make_layer(devices.contexts, num_devices=3)
    words = r"num_devices=3, but the layer is initialized on 2 contexts \(cpu\(0\), cpu"
    with pytest.raises(ValueError, match=words), autograd.train_mode():
        devices.map(layer, make_shards(devices))
    gluon_syncbn.convert_sync_batchnorm(layer, num_devices=2)
    assert_trains(devices, layer)


def test_one_shard_more_than_devices(make_devices):
    devices = make_devices(3)
    layer = make_layer(devices.contexts, num_devices=2)
    shards = make_shards(devices, X[:3])
    text = failure_of(train_step, devices, layer, shards, shards)
    assert f"SyncBatchNorm '{layer.name}'" in text
    # Any of the contexts may be the first, and the text depends on them.
    assert re.search(r"num_devices=2(, but cpu\(| is not the number)", text)
    gluon_syncbn.recover()
    gluon_syncbn.convert_sync_batchnorm(layer, num_devices=2)
    assert_trains(make_devices(2), layer)


def test_traced_before_initialization_without_num_devices():
    symbol = SyncBatchNorm(in_channels=3, prefix="norm_")(mx.sym.var("data"))
    net = SymbolBlock(symbol, mx.sym.var("data"))
    net.initialize()
    with autograd.train_mode():
        text = failure_of(net(mx.nd.array(X)).asnumpy)
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
