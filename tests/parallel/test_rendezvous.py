"""Errors of devices that do not arrive at a rendezvous, and training afterwards.

Each test makes one mistake, checks that the message names what is needed to find it,
and then trains a step whose numbers are compared with the oracle.
"""

import re
import time

import mxnet as mx
import pytest
from mxnet import autograd
from mxnet.gluon import SymbolBlock
from support.helpers import MODES, cpus, output_of, set_mode, train_step
from support.mistakes import (
    X,
    assert_trains,
    by_hand,
    by_map,
    cause_of,
    failure_of,
    make_layer,
    make_shards,
    map_and_wait,
)  # fmt: skip

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm

# ---- devices that do not arrive ------------------------------------------------------


@pytest.mark.parametrize("recover", [by_hand, by_map])
def test_timeout_in_forward(recover, devices):
    layer = make_layer(devices.contexts, num_devices=2)
    with autograd.train_mode():
        y = layer(make_shards(devices)[1])
    text = failure_of(y.asnumpy)
    assert f"SyncBatchNorm '{layer.name}', forward: waited " in text
    assert re.search(r"waited 0\.5\d* s for 1 of 2 devices", text)
    assert "Arrived: cpu(1) with shape (2, 3, 2, 5). Missing: cpu(0)." in text
    assert "call gluon_syncbn.recover()" in text
    recover(devices)
    assert_trains(devices, layer)


@pytest.mark.parametrize("recover", [by_hand, by_map])
def test_timeout_in_backward(recover, devices):
    gluon_syncbn.set_timeout(0.4)
    layer = make_layer(devices.contexts, num_devices=2, timeout=None)
    shards = make_shards(devices)
    for shard in shards:
        shard.attach_grad()
    with autograd.record():
        ys = devices.map(layer, shards)
    devices.map(lambda y: y.backward() if y.context == mx.cpu(0) else None, ys)
    text = failure_of(shards[0].grad.asnumpy)
    assert f"'{layer.name}', backward: waited 0.4" in text
    assert "Arrived: cpu(0) with shape (2, 3, 2, 5). Missing: cpu(1)." in text
    assert "backward was not called for cpu(1) from Devices.map. Call it there" in text
    recover(devices)
    assert_trains(devices, layer)


PLAIN_LOOP = """
import mxnet as mx, gluon_syncbn
from mxnet import autograd
from mxnet.gluon import nn
contexts = [mx.cpu(0), mx.cpu(1)]
net = nn.HybridSequential()
for _ in range(12):
    net.add(nn.Conv2D(16, 3, padding=1), gluon_syncbn.SyncBatchNorm(timeout=2))
net.initialize(ctx=contexts)
x = [mx.nd.ones((2, 16, 8, 8), ctx=c) for c in contexts]
[net(part) for part in x]
try:
    for _ in range(20):
        with autograd.record():
            ys = [net(part) for part in x]
        autograd.backward(ys)
        mx.nd.waitall()
except mx.MXNetError as error:
    print(error)
gluon_syncbn.recover()
with gluon_syncbn.Devices(contexts) as devices, autograd.train_mode():
    ys = devices.map(net, x)
mx.nd.waitall()
print("continued")
"""


def test_plain_loop_over_cpu_contexts_names_the_way_out():
    output = output_of(PLAIN_LOOP)
    assert (
        "Likely cause: a plain loop over CPU contexts, which deadlocks inside" in output
    )
    assert "Give the net that the loop calls to gluon_syncbn.allow_plain_loop" in output
    assert "continued" in output


# ---- causes --------------------------------------------------------------------------

# Each function makes a mistake with a layer; what it returns raises the failure.


def read_before_every_context_is_called(devices, layer, shards):
    return layer(shards[0]).asnumpy


def read_of_an_allowed_net(devices, layer, shards):
    return gluon_syncbn.allow_plain_loop(layer)(shards[0]).asnumpy


def read_inside_of_map(devices, layer, shards):
    return lambda: devices.map(lambda x: layer(x).asnumpy(), shards)


def context_that_skips_the_layer(devices, layer, shards):
    ys = devices.map(lambda x: x if x.context == mx.cpu(1) else layer(x), shards)
    return ys[0].asnumpy


def backward_of_one_context(devices, layer, shards):
    gluon_syncbn.allow_plain_loop(layer)
    ys = [layer(x) for x in shards]
    ys[0].backward()
    return layer.gamma.grad(mx.cpu(0)).asnumpy


class Sleep(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        time.sleep(1)
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register("sleep")
class SleepProp(mx.operator.CustomOpProp):
    def create_operator(self, *_):
        return Sleep()


def context_whose_work_takes_longer(devices, layer, shards):
    def late(x):
        if x.context == mx.cpu(1):
            x = mx.nd.Custom(x, op_type="sleep")
        return layer(x)

    return devices.map(late, shards)[0].asnumpy


NOT_CALLED = "the net was not called for cpu(1). In training call it for every cont"
CAUSES = {
    read_before_every_context_is_called: NOT_CALLED,
    read_of_an_allowed_net: NOT_CALLED,
    read_inside_of_map: (
        "the function that is called for cpu(0) waits for a result (asnumpy, wa"
    ),
    context_that_skips_the_layer: (
        "the function that Devices.map calls did not call the layer for cpu(1) in"
    ),
    backward_of_one_context: (
        "backward was not called for cpu(1). Call autograd.backward once, with the"
    ),
    context_whose_work_takes_longer: (
        "an operator in front of this layer has failed on cpu(1), or takes longer"
    ),
}


@pytest.mark.parametrize("mode", ["imperative", "static_shape"])
@pytest.mark.parametrize("mistake", CAUSES)
def test_likely_cause(mistake, mode, devices):
    layer = set_mode(make_layer(devices.contexts), mode)
    shards = make_shards(devices)
    with autograd.train_mode():  # the graph of a hybridized layer exists
        map_and_wait(devices, layer, shards)
    with autograd.record():
        fails = mistake(devices, layer, shards)
        assert cause_of(fails).startswith(CAUSES[mistake])
    gluon_syncbn.recover()
    assert_trains(devices, layer)


def test_a_context_used_twice_in_a_step(devices):
    layer = make_layer(devices.contexts, num_devices=2)
    first, second = make_shards(devices)
    with autograd.train_mode():
        layer(first)
        y = layer(second.as_in_context(mx.cpu(0)))
    expected = "cpu(0) got a second shard before cpu(1) got one. Give every context"
    assert cause_of(y.asnumpy).startswith(expected)


def test_the_template_of_a_parallel_net(devices):
    gluon_syncbn.set_timeout(0.5)
    net = gluon_syncbn.make_parallel(SyncBatchNorm(in_channels=3), devices.contexts)
    net.initialize()
    with autograd.train_mode():
        y = net.net(make_shards(devices)[0])
    expected = (
        "the call went to the template of a parallel net, its attribute net. Call"
    )
    assert cause_of(y.asnumpy).startswith(expected)


# ---- num_devices ---------------------------------------------------------------------


def test_more_devices_than_contexts(devices):
    layer = make_layer(devices.contexts, num_devices=3)
    words = r"num_devices=3, but the layer is initialized on 2 contexts \(cpu\(0\), cpu"
    with pytest.raises(ValueError, match=words), autograd.train_mode():
        devices.map(layer, make_shards(devices))
    gluon_syncbn.convert_sync_batchnorm(layer, num_devices=2)
    assert_trains(devices, layer)


def test_more_devices_than_shards(devices):
    """Three contexts hold the layer, two get work."""
    layer = make_layer(cpus(3))
    with autograd.train_mode():
        ys = devices.map(layer, make_shards(devices))
    expected = "the layer is initialized on cpu(2), which got no shard. Initialize the"
    assert cause_of(ys[0].asnumpy).startswith(expected)
    gluon_syncbn.recover()
    gluon_syncbn.convert_sync_batchnorm(layer, num_devices=2)
    assert_trains(devices, layer)


def test_a_device_that_is_not_known_by_name(devices):
    layer = make_layer(cpus(3), num_devices=2)
    with autograd.train_mode():
        y = layer(make_shards(devices)[0])
    text = failure_of(y.asnumpy)
    assert "Missing: 1 that never called the layer" in text
    assert "num_devices=2 is not the number of contexts that get a shard" in text
    assert "; the layer is initialized on cpu(0), cpu(1), cpu(2)." in text
    gluon_syncbn.recover()
    assert_trains(devices, layer)


def two_forward_steps(devices, layer, shards):
    for _ in range(2):
        with autograd.train_mode():
            map_and_wait(devices, layer, shards)


def step_with_backward(devices, layer, shards):
    train_step(devices, layer, shards, shards)


@pytest.mark.parametrize(
    "steps, fails",
    [(0, two_forward_steps), (2, two_forward_steps), (0, step_with_backward)],
)
def test_more_shards_than_devices(steps, fails, make_devices, devices):
    layer = make_layer(cpus(3), num_devices=2)
    three = make_devices(3)
    for _ in range(steps):
        assert_trains(devices, layer)
    text = failure_of(fails, three, layer, make_shards(three, X[[0, 1, 2]]))
    assert f"SyncBatchNorm '{layer.name}'" in text
    # Any two of the three may be the first, and the text depends on them.
    assert "num_devices=2, but cpu(" in text or "num_devices=2 is not" in text
    gluon_syncbn.recover()
    assert_trains(devices, layer)


FAILED_FORWARD = """
import mxnet as mx, gluon_syncbn
contexts = [mx.cpu(i) for i in range(3)]
layer = gluon_syncbn.SyncBatchNorm(in_channels=3, num_devices=2, timeout=0.2)
layer.initialize(ctx=contexts)
x = [mx.nd.ones((2, 3), ctx=c) for c in contexts]
devices = gluon_syncbn.Devices(contexts)
def step(part):
    with mx.autograd.record():
        y = layer(part)
    y.backward()
for _ in range(20):
    devices.map(step, x)
    gluon_syncbn.recover()
print("well")
"""


def test_backward_of_a_failed_forward_does_not_crash():
    """MXNet runs it where another operator has taken the forward's exception."""
    assert output_of(FAILED_FORWARD) == "well\n"


def forward_by_map(devices, layer):
    with autograd.train_mode():
        map_and_wait(devices, layer, make_shards(devices))


def backward_of_a_loop(devices, layer):
    with autograd.record():
        ys = [layer(x) for x in make_shards(devices)]
    mx.nd.waitall()
    autograd.backward(ys)  # of an allowed net it raises what has failed until then
    mx.nd.waitall()


def backward_of_an_allowed_loop(devices, layer):
    backward_of_a_loop(devices, gluon_syncbn.allow_plain_loop(layer))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "call", [forward_by_map, backward_of_a_loop, backward_of_an_allowed_loop]
)
def test_one_device_on_two_contexts(call, mode, devices):
    layer = set_mode(make_layer(devices.contexts, num_devices=1), mode)
    text = failure_of(call, devices, layer)
    assert "num_devices=1, but cpu(" in text
    assert "calls the layer as well as cpu(" in text
    gluon_syncbn.recover()
    gluon_syncbn.convert_sync_batchnorm(layer, num_devices=2)
    set_mode(layer, mode)
    assert_trains(devices, layer)


def test_one_device_that_moves(devices):
    """The contexts that a layer is initialized on may be more than it is used on."""
    layer = make_layer(devices.contexts, num_devices=1)
    for context in devices.contexts:
        with autograd.train_mode(), gluon_syncbn.Devices([context]) as one:
            map_and_wait(one, layer, make_shards(one))


def test_traced_before_initialization_without_num_devices():
    symbol = SyncBatchNorm(in_channels=3, prefix="norm_")(mx.sym.var("data"))
    net = SymbolBlock(symbol, mx.sym.var("data"))
    net.initialize()
    with autograd.train_mode():
        text = failure_of(net(mx.nd.array(X)).asnumpy)
    assert "num_devices=None" in text and "give num_devices" in text


# ---- devices that disagree -----------------------------------------------------------


def test_devices_disagree(devices):
    layer = make_layer(devices.contexts)
    first, second = make_shards(devices)
    shards = [first, second.astype("float64")]
    with autograd.train_mode():
        text = failure_of(map_and_wait, devices, layer, shards)
    assert f"SyncBatchNorm '{layer.name}', forward: devices disagree: " in text
    for device, dtype in ("cpu(0)", "float32"), ("cpu(1)", "float64"):
        has = f"{device} has channels=3, dtype={dtype}, axis=1, epsilon=1e-05, num"
        assert has in text and "shape (2, 3, 2, 5)" in text
    gluon_syncbn.recover()
    assert_trains(devices, layer)
