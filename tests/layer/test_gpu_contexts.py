"""The layer on GPU contexts of MXNet, in nets without any other layers."""

from gluon_syncbn import SyncBatchNorm

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support.helpers import (
    MODES,
    Loop,
    assert_all_near,
    cpus,
    put,
    queue_step,
    set_mode,
    split_rows,
    summed_grad,
    value,
    whole,
)

SHAPE = (5, 6, 7, 3)
# A sum has at most `count` terms.
LIMITS = {"count": np.prod(SHAPE), "scale": 10}


def gpus(count):
    """Return `count` contexts; skip the test if MXNet cannot use them."""
    try:
        there = mx.context.num_gpus()
    except mx.MXNetError:  # MXNet with CUDA, but no driver
        there = 0
    if there < count:
        pytest.skip(f"needs {count} GPUs that MXNet can use, there are {there}")
    return [mx.gpu(k) for k in range(count)]


def make_net(contexts):
    """Return a net of two layers, with equal parameters in each call."""
    # MXNet stores the momentum in float32, which has this number exactly.
    arguments = {"num_devices": len(contexts), "momentum": 0.875, "in_channels": 6}
    net, rng = nn.HybridSequential(), np.random.default_rng(4)
    net.add(SyncBatchNorm(activation="leaky_relu", slope=0.25, **arguments))
    net.add(SyncBatchNorm(**arguments))
    net.cast("float64")
    net.initialize(ctx=contexts)
    for parameter in net.collect_params().values():
        data = rng.normal(1, 0.3, parameter.shape)
        parameter.set_data(mx.nd.array(data, dtype="float64"))
    return net


def queue(net, contexts, seed):
    """Queue a step in an ordinary loop over contexts."""
    rng, rows = np.random.default_rng(seed), [2, 3] if len(contexts) == 2 else [5]
    x, dy = rng.normal(3, 2, SHAPE), rng.normal(size=SHAPE)
    shards, dys = (put(split_rows(v, rows), contexts, "float64") for v in (x, dy))
    for shard in shards:
        shard.attach_grad()
    return net, queue_step(Loop(contexts), net, shards, dys), shards


def results(net, ys, shards):
    """Return y, dx, and each parameter's gradient or running value."""
    mx.nd.waitall()
    found = [whole(ys), whole([shard.grad for shard in shards])]
    for parameter in net.collect_params().values():
        learned = parameter.grad_req != "null"
        found.append(summed_grad(parameter) if learned else value(parameter, -1))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 2])
def test_steps_and_prediction(count, mode):
    """Steps of the CPU and of GPUs are queued together, and their results are equal."""
    places = [cpus(1), gpus(count)]
    nets = [make_net(places[0]), set_mode(make_net(places[1]), mode)]
    for seed in range(3):
        queued = [queue(*pair, seed) for pair in zip(nets, places)]
        expected, found = [results(*step) for step in queued]
        assert_all_near(found, expected, **LIMITS)
    x = mx.nd.random.normal(shape=SHAPE, dtype="float64")
    expected, found = (n(x.copyto(c[0])).asnumpy() for n, c in zip(nets, places))
    assert_all_near([found], [expected], **LIMITS)


def test_cuda_graphs_are_refused(monkeypatch):
    contexts = gpus(1)
    net, x = make_net(contexts), mx.nd.ones(SHAPE, ctx=contexts[0], dtype="float64")
    monkeypatch.setenv("MXNET_ENABLE_CUDA_GRAPHS", "1")
    text = r"'\w+' .*gpu\(0\).*MXNET_ENABLE_CUDA_GRAPHS=1"
    with autograd.record(), pytest.raises(mx.MXNetError, match=text):
        net(x).wait_to_read()
