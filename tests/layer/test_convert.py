"""Conversion of whole nets in both directions: what changes, and all that does not."""

from operator import attrgetter

from gluon_syncbn import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    recover,
    revert_sync_batchnorm,
)
from gluon_syncbn.layer import graphs

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support.blocks import Function, by_gluon, gluon_1_only, name_scope
from support.helpers import MODES, set_mode, value, values, whole
from support.nd import nd


class Nested(Function):
    """One layer as attribute, in a list and in a container; other norms beside it."""

    def __init__(self):
        super().__init__("nested_")
        with name_scope(self):
            self.head = nn.BatchNorm(momentum=0.7, epsilon=1e-3, scale=False)
            self.body = nn.HybridSequential()
            self.body.add(nn.Conv2D(8, 3), self.head, nn.HybridSequential())
            self.body[2].add(nn.BatchNorm(center=False))
            self.instance, self.layer = nn.InstanceNorm(), nn.LayerNorm()
            self.group = nn.GroupNorm(2)
        self.layers = [self.head]

    def compute(self, F, x):
        return self.group(self.layer(self.instance(self.body(x))))


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


@pytest.mark.parametrize("mode", MODES)
def test_converts_an_initialized_net_in_place(mode, devices):
    net = set_mode(initialized(Nested(), devices.contexts), mode)
    expected = whole(devices.map(net, devices.split(batch())))
    head, original, before = net.head, kinds(net), values(net)
    assert convert_sync_batchnorm(net) is net
    assert net.head is head is net.body[1] is net.layers[0]
    assert [name for name, _ in kinds(net)] == [name for name, _ in original]
    changed = {a[1]: b[1] for a, b in zip(original, kinds(net)) if a != b}
    assert changed == {"BatchNorm": "SyncBatchNorm"}
    assert all((a == b).all() for a, b in zip(values(net), before))
    y = whole(devices.map(net, devices.split(batch())))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    with autograd.record():
        devices.map(net, devices.split(batch()))
    mx.nd.waitall()
    # Both shards are in them: the cached graph is the new one.
    first, second = (value(net.head.running_mean, k) for k in range(2))
    assert (first == second).all() and abs(first).max() > 0


def test_keeps_what_each_layer_was_set_to():
    net = convert_sync_batchnorm(Nested(), 2, unbiased_running_var=True, timeout=7)
    assert net.head._kwargs["momentum"] == 0.7
    assert net.head._kwargs["eps"] == 1e-3
    assert net.head._kwargs["fix_gamma"] is True
    assert net.body[2][0].beta.grad_req == "null"
    assert net.head.num_devices == 2
    settings = net.head._sync.settings
    assert settings.unbiased_running_var is True and settings.timeout == 7


def test_revert_is_the_inverse():
    net = initialized(Nested())
    original, text, before = kinds(net), repr(net), values(net)
    attributes = set(net.head.__dict__)
    expected = net(batch()).asnumpy()
    assert revert_sync_batchnorm(convert_sync_batchnorm(net, 2)) is net
    assert (kinds(net), repr(net)) == (original, text)
    assert set(net.head.__dict__) == attributes
    assert all((a == b).all() for a, b in zip(values(net), before))
    assert (net(batch()).asnumpy() == expected).all()


@pytest.mark.skipif(not hasattr(nn, "BatchNormReLU"), reason="MXNet 1.8 brought it")
def test_batch_norm_with_relu_keeps_its_relu():
    layer = convert_sync_batchnorm(initialized(nn.BatchNormReLU()), 1)
    with autograd.record():
        assert layer(batch()).asnumpy().min() == 0
    assert type(revert_sync_batchnorm(layer)) is nn.BatchNormReLU


class Configured(nn.BatchNorm):
    """A subclass that only sets arguments is plain."""

    def __init__(self, **options):
        super().__init__(momentum=0.5, **options)


class WithRelu(nn.BatchNorm):
    def forward(self, x):
        return nd.relu(super().forward(x))


class Called(nn.BatchNorm):
    def __call__(self, x):
        return super().__call__(x) + 1


class Squared(Configured):
    def hybrid_forward(self, F, x, **parameters):
        return F.square(super().hybrid_forward(F, x, **parameters))


@gluon_1_only("blocks have no hybrid_forward")
def test_what_a_subclass_does_is_never_lost():
    kinds = Configured, WithRelu, Called, Squared
    net = nn.Sequential(prefix="net_")
    options = {"in_channels": 3}
    net.add(*(kind(prefix=f"{kind.__name__}_", **options) for kind in kinds))
    net.add(nn.BatchNorm(**options))
    net[4].hybrid_forward = lambda F, x, **parameters: x
    initialized(net)
    with autograd.record():
        expected = net(batch()).asnumpy()
    with pytest.warns(UserWarning) as caught:
        convert_sync_batchnorm(net, 1)
    (text,) = [str(warning.message) for warning in caught]
    facts = "WithRelu forward Called __call__ Squared hybrid_forward".split()
    assert all(fact in text for fact in [*facts, net[4].name])
    assert "Configured" not in text
    assert [type(layer) for layer in net][1:] == [*kinds[1:], nn.BatchNorm]
    assert type(net[0]) is SyncBatchNorm and net[0]._kwargs["momentum"] == 0.5
    with autograd.record():
        np.testing.assert_allclose(net(batch()).asnumpy(), expected, 1e-4, 1e-5)
    assert type(revert_sync_batchnorm(net)[0]) is Configured


def test_other_settings_hold_without_a_new_trace(devices):
    net = convert_sync_batchnorm(initialized(Nested(), devices.contexts), 1)
    set_mode(net, "hybridize")
    with autograd.record():
        for context in devices.contexts[:1] * 2 + devices.contexts[1:]:
            net(batch().copyto(context)).wait_to_read()  # or both would be in use
    graph, key = net._cached_op, net.head.key
    convert_sync_batchnorm(net, 2, timeout=60)
    with autograd.record():
        devices.map(net, devices.split(batch()))
    mx.nd.waitall()  # they called it unequally often before
    convert_sync_batchnorm(net, timeout=0.1)
    with pytest.raises(mx.MXNetError, match="for 1 of 2 devices"):
        with autograd.record():
            net(batch()).wait_to_read()
    recover()
    convert_sync_batchnorm(net, 1, nonfinite="skip")
    mean = value(net.head.running_mean)
    with autograd.record():
        net(batch() * np.nan).wait_to_read()
    assert (value(net.head.running_mean) == mean).all()
    assert net._cached_op is graph and net.head.key == key


@pytest.mark.parametrize(
    "mode, guard", [("hybridize", "transpose"), ("static_shape", "amp_multicast")]
)
def test_guards_are_chosen_by_one_inference(mode, guard, monkeypatch):
    """An inference of shapes for each layer would be quadratic in the layers."""
    net = nn.HybridSequential()
    for _ in range(10):
        net.add(nn.Conv2D(3, 1), SyncBatchNorm())
    initialized(net)
    infer, make = mx.sym.Symbol.infer_shape_partial, graphs.from_nodes
    inferences, nodes = [], []

    def counted(*args, **options):
        inferences.append(args)
        return infer(*args, **options)

    def noted(*args):
        nodes[:] = args[2]
        return make(*args)

    monkeypatch.setattr(mx.sym.Symbol, "infer_shape_partial", counted)
    monkeypatch.setattr(graphs, "from_nodes", noted)
    with autograd.record():
        set_mode(net, mode)(batch())
    assert len(inferences) == 1
    names = [node["op"] for node in nodes if node["op"] not in ("null", "Convolution")]
    assert names == ["Reshape", "Custom", guard] * 10
