"""make_parallel beside oneDNN's layouts, and over many steps."""

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import Trainer, nn
from support import reference
from support.deep_nets import REPEAT
from support.helpers import cpus, differentiate, status

import gluon_syncbn
from gluon_syncbn import make_parallel


def test_gradients_in_blocked_layouts():
    """The gradients of gathered outputs are results of convolutions."""
    rng = np.random.default_rng(0)
    x = mx.nd.array(rng.normal(size=(5, 3, 20, 20)))
    net = make_parallel(nn.Conv2D(16, 3, padding=1, use_bias=False), cpus(2))
    net.initialize(mx.init.Xavier())
    top = nn.HybridSequential()
    top.add(nn.Conv2D(16, 3, padding=1), nn.Activation("relu"))
    top.add(nn.Conv2D(4, 3, padding=1))
    top.initialize(mx.init.Xavier())
    gradients = []
    for each in [net.net] + [net] * (3 * REPEAT):
        x.attach_grad()
        differentiate(lambda net: (top(net(x)) ** 2).sum(), each)
        weights = [g.asnumpy().astype("f8") for g in net.net.weight.list_grad()]
        if each is net.net:
            weights = weights[:1]
        gradients.append([sum(weights), x.grad.asnumpy()])
    for result in gradients[1:]:
        for value_, expected in zip(result, gradients[0]):
            scale = abs(expected).max()
            # Sums over 2000 pixels and 144 weights of values of that size.
            rtol, atol = reference.tolerance("float32", 2000, scale=30 * scale)
            np.testing.assert_allclose(value_, expected, rtol, atol)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("half", [150, pytest.param(1000, marks=pytest.mark.full)])
def test_many_steps_do_not_grow(half, devices):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3), nn.BatchNorm(), nn.Dropout(0.3), nn.Dense(2))
    net = make_parallel(net, devices.contexts)
    net.initialize()
    net.hybridize()
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3})
    rng = np.random.default_rng(0)
    used = {}
    for number in range(1, 2 * half + 1):
        x = mx.nd.array(rng.normal(size=(1 + number % 4, 3, 8, 8)))
        x.attach_grad()
        total = differentiate(lambda x: (net(x) ** 2).sum(), x)
        trainer.step(len(x))
        if number % 10 == 0:
            assert np.isfinite(total.asscalar())
        if number in (half, 2 * half):
            mx.nd.waitall()
            used[number] = status("VmRSS"), status("Threads")
    gluon_syncbn.check_replicas(net)
    (memory, threads), (more_memory, more_threads) = used.values()
    assert more_memory - memory < 16 * 1024, used
    assert more_threads <= threads + 1, used
