"""participating: steps in which some devices get no shard.

Numbers are compared by the random programs.
"""

import re

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, participating

import mxnet as mx
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support.helpers import cpus, whole
from support.nd import nd


def test_who_is_left_out_beside_a_failure_gets_statistics(make_devices):
    devices = make_devices(3)
    net = nn.HybridSequential()
    net.add(SyncBatchNorm(in_channels=1), SyncBatchNorm(in_channels=1, timeout=0.5))
    net.initialize(ctx=devices.contexts)
    shards = [nd.array([[1.0], [5.0]], ctx=c) for c in devices.contexts]

    def call(layers, shard):
        return shard if layers is None else layers(shard)

    with pytest.raises(mx.MXNetError, match=r"Missing: cpu\(1\)"):
        with autograd.train_mode(), participating(net, devices.contexts[:2]):
            devices.map(call, [net, net[0], None], shards)
    gluon_syncbn.recover()
    means = [[m.asnumpy().item() for m in n.running_mean.list_data()] for n in net]
    assert means[0] == pytest.approx([0.3, 0.3, 0.3]) and means[1] == [0, 0, 0]


def test_mistakes_leave_all_participants(make_devices):
    """A context that is not named, one without the layer, and an error of the user."""
    devices, layer = make_devices(3), SyncBatchNorm(in_channels=1)
    layer.initialize(ctx=devices.contexts)
    shards = [nd.array([[k]], ctx=c) for k, c in enumerate(devices.contexts)]
    with pytest.raises(
        mx.MXNetError, match=r"cpu\(\d\) calls the layer, but .* names only cpu\(1\)"
    ):
        with autograd.train_mode(), participating(layer, [mx.cpu(1)]):
            devices.map(layer, shards)
    gluon_syncbn.recover()
    words = (
        f"contexts names cpu(5), but SyncBatchNorm '{layer.name}' is initialized on "
        "cpu(0), cpu(1), cpu(2)"
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        with participating(layer, [mx.cpu(5)]):
            pass
    with pytest.raises(KeyError):
        with participating(layer, cpus(1)):
            raise KeyError
    with autograd.train_mode():
        ys = devices.map(layer, shards)
    assert abs(whole(ys)[:, 0] - [-(1.5**0.5), 0, 1.5**0.5]).max() < 1e-4
