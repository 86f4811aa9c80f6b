"""Parameter files and exported symbols: nn.BatchNorm's, one set for all devices."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.helpers import MODES, cpus, imported, output_of, set_mode, value

import gluon_syncbn

TRAIN = """
import itertools, sys, gluon_syncbn, numpy as np, mxnet as mx
from support.helpers import MODES, imported, set_mode
from mxnet import autograd
for path, mode in itertools.product(sys.argv[1:], MODES):
    net = set_mode(imported(path), mode)
    result = net(mx.nd.array(np.load(path + 'x.npy'))).asnumpy()
    print(abs(result - np.load(path + 'y.npy')).max(), end=' ')
    rng = np.random.default_rng(0)
    trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', {'learning_rate': 1e-4})
    for step in range(5):
        with autograd.record():
            y = net(mx.nd.array(rng.normal(1, 2, (6, 3, 10, 10))))
            loss = ((y - 1) ** 2).mean()
        loss.backward()
        trainer.step(1)
        print(loss.asscalar(), end=' ')
    print()
"""


EXPORTED = list(MODES)[1:]  # MXNet exports hybridized nets only


def conv_net(norm):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(16, 3, padding=1), norm(), nn.Activation("relu"))
        net.add(nn.Conv2D(16, 3), norm())
    return net


def ours():
    return gluon_syncbn.SyncBatchNorm(num_devices=2)


def batch(seed=0):
    return mx.nd.array(np.random.default_rng(seed).normal(1, 2, (6, 3, 10, 10)))


def trained(devices, mode="hybridize"):
    """A net after three steps on two contexts, which leave its replicas equal."""
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
        assert parameter.list_ctx() == devices.contexts
    # gamma is above 100, and a convolution's roundings in float32 grow by it.
    for each in net, plain:
        each.cast("float64")
    x = batch().astype("float64")
    y = net(x).asnumpy()
    np.testing.assert_allclose(plain(x).asnumpy(), y, rtol=1e-4, atol=1e-5)


def test_exported_nets_run_and_train_elsewhere(tmp_path):
    """In whichever mode they were traced, their layers are guarded for every mode."""
    paths = [tmp_path / mode for mode in EXPORTED]
    for path in paths:
        net = set_mode(conv_net(gluon_syncbn.SyncBatchNorm), path.name)
        net.initialize(mx.init.Xavier())
        with autograd.record():
            net(batch())  # moves the running statistics
        np.save(f"{path}x.npy", batch().asnumpy())
        y = net(batch()).asnumpy()
        np.save(f"{path}y.npy", y)
        net.export(str(path))
        assert (net(batch()).asnumpy() == y).all()
    lines = output_of(TRAIN, *paths, timeout=120).splitlines()
    values = np.array([line.split() for line in lines], float).reshape((3, 4, 6))
    differences, losses = values[..., 0], values[..., 1:]
    assert differences.max() < 1e-5
    for of_path in losses:
        for of_mode in of_path[1:]:
            np.testing.assert_allclose(of_mode, of_path[0], rtol=1e-3)


def test_graph_for_gpus_is_exported_for_every_device(tmp_path, monkeypatch):
    net = conv_net(gluon_syncbn.SyncBatchNorm)
    net.initialize()
    net(batch())  # parameters of known shapes, which MXNet 1.6 needs for a graph
    monkeypatch.setattr(gluon_syncbn.SyncBatchNorm, "contexts", lambda _: [mx.gpu(0)])
    net.hybridize()
    net._get_graph(batch())
    assert '"guard": "gpu"' in net._cached_graph[1].tojson()
    monkeypatch.undo()
    net._build_cache(batch())
    net.export(str(tmp_path / "net"))
    net.hybridize()
    y = net(batch()).asnumpy()
    assert (imported(tmp_path / "net")(batch()).asnumpy() == y).all()


@pytest.mark.parametrize("mode", ["hybridize", "static_shape"])
def test_onnx_of_a_net_that_was_not_reverted(mode, tmp_path):
    if hasattr(mx, "onnx"):
        from mxnet.onnx.mx2onnx._export_onnx import MXNetGraph
    else:  # MXNet before 1.9
        from mxnet.contrib.onnx.mx2onnx.export_onnx import MXNetGraph

    net = nn.HybridSequential()
    net.add(nn.Conv2D(2, 3), gluon_syncbn.SyncBatchNorm(prefix="norm_"))
    net.initialize()
    set_mode(net, mode)
    net(mx.nd.ones((2, 3, 6, 6)))
    net.export(str(tmp_path / "net"))
    symbol = mx.sym.load(str(tmp_path / "net-symbol.json"))
    words = (
        "the graph has 'norm_fwd': before the export call "
        r"gluon_syncbn.revert_sync_batchnorm\(net\), and the net"
    )
    with pytest.raises(ValueError, match=words):
        MXNetGraph().create_onnx_graph_proto(symbol, {}, [(2, 3, 6, 6)], [1])


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
    layer.collect_params().reset_ctx(cpus(3))
    assert layer.num_devices == 3
