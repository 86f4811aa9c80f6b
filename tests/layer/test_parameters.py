"""Parameter files and exported symbols: nn.BatchNorm's, one set for all devices."""

import gluon_syncbn
from gluon_syncbn.mxnet_private.parameters import contexts_of

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.blocks import move, name_scope, prefixed
from support.helpers import MODES, cpus, imported, run_python, set_mode, value
from support.nd import nd


def conv_net(norm):
    net = nn.HybridSequential(**prefixed("net_"))
    with name_scope(net):
        net.add(nn.Conv2D(16, 3, padding=1), norm(), nn.Activation("relu"))
        net.add(nn.Conv2D(16, 3), norm())
    return net


def ours():
    return gluon_syncbn.SyncBatchNorm(num_devices=2)


def batch(seed=0):
    return nd.array(np.random.default_rng(seed).normal(1, 2, (6, 3, 10, 10)))


def trained(devices, mode="hybridize"):
    """Return a net after three steps on two contexts, with equal replicas."""
    net = conv_net(ours)
    net.initialize(mx.init.Xavier(), ctx=devices.contexts)
    set_mode(net, mode)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for seed in range(3):
        with autograd.record():
            ys = devices.map(net, devices.split(batch(seed)))
        devices.map(lambda y: y.backward(y), ys)
        trainer.step(6)
    mx.nd.waitall()
    gluon_syncbn.check_replicas(net)
    return net


def assert_equal_parameters(net, other):
    pairs = zip(net.collect_params().items(), other.collect_params().items())
    for (name, mine), (other_name, theirs) in pairs:
        assert name == other_name and (value(mine) == value(theirs)).all()


def test_batch_norm_loads_and_saves_the_same_files(devices, tmp_path):
    net, file = trained(devices), str(tmp_path / "net.params")
    net.save_parameters(file)
    assert len(mx.nd.load(file)) == len(net.collect_params().keys())
    plain, again = conv_net(nn.BatchNorm), conv_net(ours)
    plain.load_parameters(file)
    assert_equal_parameters(net, plain)
    plain.save_parameters(file)
    again.load_parameters(file, ctx=devices.contexts)
    assert_equal_parameters(again, plain)
    for parameter in again.collect_params().values():
        assert contexts_of(parameter) == devices.contexts
    # gamma is above 100, and a convolution's roundings in float32 grow by it.
    for each in net, plain:
        each.cast("float64")
    x = batch().astype("float64")
    y = net(x).asnumpy()
    np.testing.assert_allclose(plain(x).asnumpy(), y, rtol=1e-4, atol=1e-5)


LOAD = """
import sys, gluon_syncbn
from support.helpers import imported
imported(sys.argv[1])
"""


def test_an_export_runs_in_its_process_only(tmp_path):
    """There in every mode, also if it was traced for static_shape."""
    net, x = conv_net(gluon_syncbn.SyncBatchNorm), batch()
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
    error = run_python(LOAD, tmp_path / "net").stderr
    assert "SyncBatchNorm layer that is not in this process" in error
    assert "Call gluon_syncbn.revert_sync_batchnorm(net) before" in error


def gradient(net, x):
    x.attach_grad()
    with autograd.record():
        y = net(x)
    y.backward(y)
    return x.grad.asnumpy()


def test_graph_for_gpus_is_refused_on_a_cpu(monkeypatch):
    net = conv_net(gluon_syncbn.SyncBatchNorm)
    net.initialize()
    net(batch())  # parameters of known shapes, which MXNet 1.6 needs for a graph
    net.hybridize()
    with monkeypatch.context() as patch:
        patch.setattr(gluon_syncbn.SyncBatchNorm, "contexts", lambda _: [mx.gpu(0)])
        net._get_graph(batch())
    with pytest.raises(mx.MXNetError, match=r"GPU.*cpu\(0\)"):
        net(batch()).asnumpy()


def test_export_needs_a_call_after_revert(devices, tmp_path):
    net = trained(devices, "static_shape")
    gluon_syncbn.revert_sync_batchnorm(net)
    with pytest.raises(RuntimeError, match="run forward"):
        net.export(str(tmp_path / "net"))
    net(batch())
    net.export(str(tmp_path / "net"))
    assert "gluon_syncbn" not in (tmp_path / "net-symbol.json").read_text()


def test_contexts_of_parameters_follow_reset_ctx():
    layer = gluon_syncbn.SyncBatchNorm(in_channels=3)
    layer.initialize(ctx=cpus(2))
    assert layer.num_devices == 2
    move(layer, cpus(3))
    assert layer.num_devices == 3
