"""Conversion of nets in both directions, what it does not change, and exports."""

from operator import attrgetter

from gluon_syncbn import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    make_parallel,
    revert_parallel,
    revert_sync_batchnorm,
)

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support.blocks import Function, by_gluon, gluon_1_only, name_scope
from support.helpers import (
    MODES,
    differentiate,
    imported,
    ready,
    run_python,
    set_mode,
    values,
)
from support.nd import nd


class Nested(Function):
    """One layer is an attribute, in a list and in a container."""

    def __init__(self):
        super().__init__("nested_")
        with name_scope(self):
            self.head = nn.BatchNorm(momentum=0.7, epsilon=1e-3, scale=False)
            self.body = nn.HybridSequential()
            self.body.add(nn.Conv2D(8, 3), self.head, nn.HybridSequential())
            self.body[2].add(nn.BatchNorm(center=False))
        self.layers = [self.head]

    def compute(self, F, x):
        return self.body(x)


def batch():
    return nd.array(np.random.default_rng(0).normal(1, 2, (4, 3, 8, 8)))


def initialized(net, ctx=None):
    net.initialize(mx.init.Xavier(), ctx=ctx or [mx.cpu()])
    net(batch())
    return net


def kinds(net):
    found, name = [], by_gluon(attrgetter("name"), id)
    net.apply(lambda block: found.append((name(block), type(block).__name__)))
    return found


def test_converts_an_initialized_net_in_place_and_back(devices):
    net = initialized(Nested(), devices.contexts)
    head, original, text, before = net.head, kinds(net), repr(net), values(net)
    attributes = set(vars(head))
    converted = convert_sync_batchnorm(net, unbiased_running_var=True, timeout=7)
    assert converted is net and net.head is head is net.body[1] is net.layers[0]
    changed = [(a, b) for a, b in zip(original, kinds(net)) if a != b]
    assert [(a[0], "SyncBatchNorm") for a, _ in changed] == [b for _, b in changed]
    settings, kept = head._sync.settings, head._kwargs
    assert settings.unbiased_running_var is True and settings.timeout == 7
    assert (kept["momentum"], kept["eps"], kept["fix_gamma"]) == (0.7, 1e-3, True)
    assert net.body[2][0].beta.grad_req == "null"
    assert all((a == b).all() for a, b in zip(values(net), before))
    make_parallel(net, devices.contexts)
    assert revert_sync_batchnorm(net) is net
    revert_parallel(net)
    assert "forward" not in vars(net)  # conversion and make_parallel had replaced it
    assert (kinds(net), repr(net)) == (original, text)
    assert set(vars(head)) == attributes


class BatchNormCudnnOff(nn.BatchNorm):
    """Converted, because it only sets arguments. GluonCV has a class of this name."""

    def __init__(self, **options):
        super().__init__(momentum=0.5, **options)


class SyncWithRelu(SyncBatchNorm):
    def forward(self, x):
        return nd.relu(super().forward(x))


class WithRelu(nn.BatchNorm):
    def forward(self, x):
        return nd.relu(super().forward(x))


class Called(nn.BatchNorm):
    def __call__(self, x):
        return super().__call__(x) + 1


@gluon_1_only("blocks of Gluon 2 have no hybrid_forward")
def test_what_a_subclass_does_is_never_lost():
    classes = BatchNormCudnnOff, WithRelu, Called, SyncWithRelu
    net = nn.Sequential(prefix="net_")
    options = {"in_channels": 3}
    net.add(*(cls(prefix=f"{cls.__name__}_", **options) for cls in classes))
    net.add(nn.BatchNorm(**options))
    net[-1].hybrid_forward = lambda F, x, **parameters: x
    initialized(net)
    with autograd.record():
        expected = net(batch()).asnumpy()
    with pytest.warns(UserWarning) as caught:
        convert_sync_batchnorm(net, 1)
    (text,) = [str(warning.message) for warning in caught]
    facts = "WithRelu forward Called __call__ hybrid_forward".split()
    assert all(fact in text for fact in [*facts, net[-1].name])
    assert "BatchNormCudnnOff" not in text and "Sync" not in text
    assert [type(layer) for layer in net][1:] == [*classes[1:], nn.BatchNorm]
    assert type(net[0]) is SyncBatchNorm and net[0]._kwargs["momentum"] == 0.5
    with autograd.record():
        np.testing.assert_allclose(net(batch()).asnumpy(), expected, 1e-4, 1e-5)
    reverted = [type(layer) for layer in revert_sync_batchnorm(net)]
    assert reverted == [*classes, nn.BatchNorm]


# ---- Exported graphs.


def conv_net():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, padding=1), SyncBatchNorm(), nn.Activation("relu"))
    net.add(nn.Conv2D(16, 3), SyncBatchNorm())
    return net


def test_an_export_runs_in_its_process_only(tmp_path):
    net, x = conv_net(), batch()
    net.initialize(mx.init.Xavier())
    set_mode(net, "static_shape")(x)
    with pytest.warns(UserWarning, match="'.*', '.*'.*revert_sync_batchnorm") as caught:
        net.export(str(tmp_path / "net"))
    assert [warning.filename for warning in caught] == [__file__]
    set_mode(net, "hybridize")
    expected = gradient(net, x)
    for mode in MODES:
        again = set_mode(imported(tmp_path / "net"), mode)
        for _ in range(5):
            np.testing.assert_allclose(gradient(again, x), expected, 1e-3, 1e-5)
    program = "import sys; from support.helpers import imported; imported(sys.argv[1])"
    error = run_python(program, tmp_path / "net").stderr
    assert "SyncBatchNorm layer that is not in this process" in error
    assert "Call gluon_syncbn.revert_sync_batchnorm(net) before" in error


def gradient(net, x):
    x.attach_grad()
    differentiate(lambda: net(x) ** 2)
    return x.grad.asnumpy()


def test_graph_for_gpus_is_refused_on_a_cpu(monkeypatch):
    net = ready(conv_net())
    net(batch())  # parameters of known shapes, which MXNet 1.6 needs for a graph
    net.hybridize()
    with monkeypatch.context() as patch:
        patch.setattr(SyncBatchNorm, "contexts", lambda _: [mx.gpu(0)])
        net._get_graph(batch())
    with pytest.raises(mx.MXNetError, match=r"GPU.*cpu\(0\)"):
        net(batch()).asnumpy()
