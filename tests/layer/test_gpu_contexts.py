"""The layer in MXNet on GPU contexts.

The tests need GPUs that MXNet's wheel has kernels for (sm_50 to sm_89), or those that
scripts/check_gpu_wheel.py emulates. On these, MXNet's own operators do nothing, so nets
consist of our layers alone, and all else is copies.
"""

from contextlib import ExitStack

from gluon_syncbn import Devices, SyncBatchNorm
from gluon_syncbn.native.library import load

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support import reference
from support.helpers import (
    MODES,
    Loop,
    assert_all_near,
    put,
    queue_step,
    set_mode,
    split_rows,
    summed_grad,
    value,
    whole,
)

SHAPE = (5, 6, 7, 3)
SLOPE = 0.25
# No sum is of more terms than the batch has elements.
LIMITS = {"count": np.prod(SHAPE), "scale": 10}
MOMENTUM = 0.875  # MXNet keeps it in float32, which loses nothing of this one
CPUS, ONE, GPUS = "cpu(0) cpu(1)", "gpu(0)", "gpu(0) gpu(1)"


def contexts_of(places):
    """Return the contexts of these names; skip the test if a GPU is missing."""
    contexts = [mx.Context(place[:3], int(place[4])) for place in places.split()]
    try:
        there = mx.context.num_gpus()
    except mx.MXNetError:  # MXNet with CUDA, but no driver
        there = 0
    wanted = sum(context.device_type == "gpu" for context in contexts)
    if there < wanted:
        pytest.skip(f"needs {wanted} GPUs that MXNet can use, there are {there}")
    return contexts


@pytest.fixture(params=[ONE, GPUS])
def contexts(request):
    return contexts_of(request.param)


def make_net(contexts, dtype="float64"):
    """Two layers, the first with an activation."""
    arguments = {"num_devices": len(contexts), "momentum": MOMENTUM}
    net = nn.HybridSequential()
    net.add(SyncBatchNorm(activation="leaky_relu", slope=SLOPE, **arguments))
    net.add(SyncBatchNorm(**arguments))
    rng = np.random.default_rng(4)
    net.cast(dtype)
    for parameter in parameters(net):
        parameter.shape = SHAPE[1:2]
    net.initialize(ctx=contexts)
    for parameter in parameters(net):
        data = rng.normal(1, 0.3, parameter.shape)
        parameter.set_data(mx.nd.array(data, dtype=parameter.dtype))
    return net


def make_plain(net):
    """Return the same net on one CPU, where other tests compare it with the oracle."""
    plain = make_net([mx.cpu()])
    for mine, other in zip(parameters(net), parameters(plain)):
        other.set_data(mx.nd.array(value(mine), dtype="float64"))
    return plain


def parameters(net):
    return list(net.collect_params().values())


def driver_of(contexts):
    """Return Devices for CPUs; an ordinary loop is enough for GPUs."""
    return (Loop if contexts[0].device_type == "gpu" else Devices)(contexts)


def queue_batch(devices, net, seed=0):
    """Forward and backward on shards of a batch; returns outputs and inputs."""
    rng = np.random.default_rng(seed)
    x, dy = rng.normal(3, 2, SHAPE), rng.normal(size=SHAPE)
    contexts = devices.contexts
    rows = [2, 3] if len(contexts) == 2 else [5]
    shards, dys = (put(split_rows(v, rows), contexts, "float64") for v in (x, dy))
    for shard in shards:
        shard.attach_grad()
    return queue_step(devices, net, shards, dys), shards


def results(net, ys, shards):
    """y, dx, and of each parameter the gradient or running value, as NumPy arrays."""
    mx.nd.waitall()
    found = [whole(ys), whole([shard.grad for shard in shards])]
    for parameter in parameters(net):
        learned = parameter.grad_req != "null"
        found.append(summed_grad(parameter) if learned else value(parameter, -1))
    return found


def check_steps(net, contexts, plain, compared):
    """Compare the first `compared` results of each of two steps."""
    with driver_of(contexts) as devices, Devices(mx.cpu()) as one:
        for seed in range(2):
            found = results(net, *queue_batch(devices, net, seed))[:compared]
            right = results(plain, *queue_batch(one, plain, seed))[:compared]
            assert len(found) == compared
            assert_all_near(found, right, **LIMITS)


@pytest.mark.parametrize("mode", MODES)
def test_steps_and_prediction(mode, contexts):
    net = make_net(contexts)
    plain = make_plain(net)
    check_steps(set_mode(net, mode), contexts, plain, 2 + 4 * 2)
    x = np.random.default_rng(9).normal(size=SHAPE)
    expected = plain(mx.nd.array(x, dtype="float64")).asnumpy()
    with driver_of(contexts) as devices:
        ys = devices.map(net, put([x] * len(contexts), contexts, "float64"))
        found = [y.asnumpy() for y in ys]
        assert_all_near(found, [expected] * len(contexts), **LIMITS)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes(dtype, contexts):
    """The means of y are beta, however large the means of x are."""
    net = make_net(contexts, dtype=dtype)
    rows = [1] * len(contexts)
    shape = (len(rows), *SHAPE[1:])
    x = np.random.default_rng(1).normal(1e3, 1, shape).astype(dtype)
    with driver_of(contexts) as devices, autograd.train_mode():
        ys = devices.map(net, put(split_rows(x, rows), contexts, dtype))
        y = whole(ys).astype("float64")
    beta = value(net[1].beta).astype("float64")
    count, terms = y.size // y.shape[1], abs(y).max() + abs(beta).max()
    stored, atol = reference.tolerance(dtype, count, 1e3, terms)
    np.testing.assert_allclose(y.mean((0, 2, 3)), beta, 0, stored * terms + atol)


def test_cuda_graphs_are_refused(monkeypatch):
    """MXNet would replay backward without the layer, which nothing could end."""
    contexts = contexts_of(ONE)
    net = make_net(contexts)
    x = mx.nd.ones(SHAPE, ctx=contexts[0], dtype="float64")
    monkeypatch.setenv("MXNET_ENABLE_CUDA_GRAPHS", "1")
    text = r"'\w+' .*gpu\(0\).*MXNET_ENABLE_CUDA_GRAPHS=1"
    with autograd.record(), pytest.raises(mx.MXNetError, match=text):
        net(x).wait_to_read()
    monkeypatch.setenv("MXNET_ENABLE_CUDA_GRAPHS", "0")
    check_steps(net, contexts, make_plain(net), 2)


def test_memory_is_mxnets():
    """A layer allocates nothing beside MXNet's pool, also where it keeps x."""
    contexts = contexts_of(ONE)
    count = getattr(load(), "emulated_cuda_allocations", None)
    if count is None:
        pytest.skip("counts the calls of an emulated runtime")
    net = make_net(contexts)
    zeros = mx.nd.zeros(SHAPE[1:2], dtype="float64")
    net[0].gamma.set_data(zeros)  # x of all channels is kept
    check_steps(net, contexts, make_plain(net), 2)
    assert count() == 0


def test_cpus_and_gpus_side_by_side(contexts):
    """Steps of both are in flight at once."""
    places = contexts_of(CPUS), contexts
    nets = [make_net(contexts) for contexts in places]
    plain = make_plain(nets[0])
    with ExitStack() as stack:
        both = [stack.enter_context(driver_of(contexts)) for contexts in places]
        one = stack.enter_context(Devices(mx.cpu()))
        for seed in range(5):
            queued = [
                (net, *queue_batch(devices, net, seed))
                for devices, net in zip(both, nets)
            ]
            right = results(plain, *queue_batch(one, plain, seed))
            for step in queued:
                assert_all_near(results(*step), right, **LIMITS)
