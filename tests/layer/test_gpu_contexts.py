"""The layer in MXNet on GPU contexts.

The tests need GPUs that MXNet's wheel has kernels for (sm_50 to sm_89), or those that
scripts/check_gpu_wheel.py emulates. On these, MXNet's own operators do nothing, so nets
consist of our layers alone, and all else is copies.
"""

from gluon_syncbn import Devices, SyncBatchNorm

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
# No sum is of more terms than the batch has elements.
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


@pytest.fixture(params=[1, 2])
def contexts(request):
    return gpus(request.param)


def make_net(contexts):
    """Return two layers, the first with an activation, that are equal in each call."""
    # MXNet keeps the momentum in float32, which loses nothing of this one.
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
    """Queue a step; an ordinary loop is enough for GPUs."""
    rng, rows = np.random.default_rng(seed), [2, 3] if len(contexts) == 2 else [5]
    x, dy = rng.normal(3, 2, SHAPE), rng.normal(size=SHAPE)
    shards, dys = (put(split_rows(v, rows), contexts, "float64") for v in (x, dy))
    for shard in shards:
        shard.attach_grad()
    kind = Loop if contexts[0].device_type == "gpu" else Devices
    return net, queue_step(kind(contexts), net, shards, dys), shards


def results(net, ys, shards):
    """Return y, dx, and of each parameter the gradient or running value."""
    mx.nd.waitall()
    found = [whole(ys), whole([shard.grad for shard in shards])]
    for parameter in net.collect_params().values():
        learned = parameter.grad_req != "null"
        found.append(summed_grad(parameter) if learned else value(parameter, -1))
    return found


def check_steps(net, contexts):
    """Compare steps with a net on one CPU, which other tests compare with the oracle.

    Steps of CPUs are in flight beside steps of GPUs.
    """
    places = [cpus(1), cpus(2), contexts]
    nets = [make_net(cpus(1)), make_net(cpus(2)), net]
    for seed in range(3):
        queued = [queue(*pair, seed) for pair in zip(nets, places)]
        expected, *others = [results(*step) for step in queued]
        for found in others:
            assert_all_near(found, expected, **LIMITS)
    x = [np.random.default_rng(9).normal(size=SHAPE)]
    expected, found = (
        nets[0](*put(x, cpus(1), "float64")),
        net(*put(x, contexts, "float64")),
    )
    assert_all_near([found.asnumpy()], [expected.asnumpy()], **LIMITS)


@pytest.mark.parametrize("mode", MODES)
def test_steps_and_prediction(mode, contexts):
    check_steps(set_mode(make_net(contexts), mode), contexts)


def test_cuda_graphs_are_refused(monkeypatch):
    """MXNet would replay backward without the layer, which nothing could end."""
    contexts = gpus(1)
    net, x = make_net(contexts), mx.nd.ones(SHAPE, ctx=contexts[0], dtype="float64")
    monkeypatch.setenv("MXNET_ENABLE_CUDA_GRAPHS", "1")
    text = r"'\w+' .*gpu\(0\).*MXNET_ENABLE_CUDA_GRAPHS=1"
    with autograd.record(), pytest.raises(mx.MXNetError, match=text):
        net(x).wait_to_read()
