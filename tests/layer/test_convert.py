"""Conversion of whole nets in both directions: what changes, and all that does not."""

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
from support.helpers import values
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
