"""Exported graphs are refused in other processes, and graphs for GPUs on CPUs."""

from gluon_syncbn import SyncBatchNorm

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support.helpers import MODES, imported, ready, run_python, set_mode
from support.nd import nd


def conv_net():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3, padding=1), SyncBatchNorm(), nn.Activation("relu"))
    net.add(nn.Conv2D(16, 3), SyncBatchNorm())
    return net


def batch():
    return nd.array(np.random.default_rng(0).normal(1, 2, (6, 3, 10, 10)))


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
    with autograd.record():
        y = net(x)
    y.backward(y)
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
