"""Layers in the graph of a SymbolBlock: exported SyncBatchNorms and converted nodes."""

import copy
import warnings

from gluon_syncbn import (
    SyncBatchNorm,
    check_replicas,
    convert_sync_batchnorm,
    freeze_statistics,
    make_parallel,
    recompute_statistics,
    revert_sync_batchnorm,
)
from gluon_syncbn.layer.finding import synchronized_layers

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import HybridBlock, SymbolBlock, Trainer, nn
from support import reference
from support.blocks import gluon_1_only
from support.helpers import (
    MODES,
    assert_all_near,
    assert_near,
    cpus,
    operators,
    set_mode,
    summed_grad,
    value,
)

pytestmark = gluon_1_only("blocks take no symbols")

DATA = mx.sym.var("data")


def node():
    return SymbolBlock(mx.sym.BatchNorm(DATA, name="bn", fix_gamma=False), DATA)


def test_a_copy_has_layers_of_its_own():
    net = convert_sync_batchnorm(node(), 2)
    twin = copy.deepcopy(net)
    freeze_statistics(net)
    keys = [layer.key for net in (net, twin) for layer in synchronized_layers(net)]
    assert len(set(keys)) == 2 and "Custom" in operators(twin)
    assert keys[1] in twin(DATA).tojson()


def test_a_graph_needs_the_number_of_its_devices():
    with pytest.raises(ValueError, match="bn.*initialize"):
        convert_sync_batchnorm(node())
    net = node()
    net.initialize(ctx=cpus(2))
    (layer,) = synchronized_layers(convert_sync_batchnorm(net))
    assert layer.num_devices == 2


def test_a_trainer_waits_for_the_layers_of_a_graph():
    net = SymbolBlock(SyncBatchNorm(in_channels=1)(DATA), DATA)  # its own parameters
    net.initialize()
    trainer = Trainer(convert_sync_batchnorm(net).collect_params(), "sgd")
    assert type(trainer) is not Trainer  # a subclass that waits


class Branches(HybridBlock):
    """Two layers on one set of parameters, neither of which waits for the other."""

    def __init__(self):
        super().__init__()
        self.a = nn.BatchNorm(in_channels=3)
        self.b = nn.BatchNorm(in_channels=3, params=self.a.params)

    def hybrid_forward(self, F, x):
        return self.a(x) + self.b(F.tanh(x))


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_statistics_that_layers_share(is_graph, mode):
    for _ in range(10 if mode == "static_shape" else 2):
        net = SymbolBlock(Branches()(DATA), DATA) if is_graph else Branches()
        make_parallel(net, cpus(2)).initialize()
        set_mode(net, mode)
        for _ in range(5):
            with autograd.record():
                loss = net(mx.nd.random.normal(1, 2, shape=(12, 3)))
            loss.backward()
        check_replicas(net)


@pytest.mark.parametrize("normalization", ["null", "valid"])
def test_a_gradient_that_is_divided_by_rows(normalization):
    """MXNet's loss operator is in the net, in a graph and imperatively."""
    options = {"normalization": normalization, "use_ignore": True}

    class Net(HybridBlock):
        def __init__(self):
            super().__init__()
            self.dense = nn.Dense(3, in_units=2, use_bias=False)

        def hybrid_forward(self, F, x, y):
            return F.SoftmaxOutput(self.dense(x), y, **options)

    inputs = DATA, mx.sym.var("label")
    for net in Net(), SymbolBlock(Net()(*inputs), inputs):
        net.initialize(mx.init.One(), ctx=cpus(2))
        make_parallel(net, cpus(2))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                with autograd.record():
                    y = net(mx.nd.ones((4, 2)), mx.nd.array([0, 1, 2, 0]))
                y.backward()
        found = [w for w in caught if "gradients of SoftmaxOutput" in str(w.message)]
        assert len(found) == (normalization != "null")
        if normalization == "null":
            (weight,) = net.collect_params().values()
            assert_near(summed_grad(weight)[0], [-2 / 3] * 2, count=4)


class Masked(HybridBlock):
    def __init__(self):
        super().__init__()
        self.norm = SyncBatchNorm(axis=2, in_channels=1, num_devices=1)

    def hybrid_forward(self, F, x, mask):
        return self.norm(x, mask)


def test_a_graph_with_a_mask():
    """The graph is not reverted, because BatchNorm accepts no mask."""
    x, mask = mx.nd.array([[[1.0], [3.0], [999.0]]]), mx.nd.array([[1, 1, 0]])
    inputs = DATA, mx.sym.var("mask")
    net = SymbolBlock(Masked()(*inputs), inputs)
    net.initialize(mx.init.One())  # beta also
    for _ in range(2):
        with autograd.record():
            y = net(x, mask)
        np.testing.assert_allclose(y.asnumpy().ravel(), [0, 2, 0], atol=1e-4)
        with pytest.raises(ValueError, match="batchnorm"):
            revert_sync_batchnorm(net)
        convert_sync_batchnorm(net)
    mx.nd.waitall()
    revert_sync_batchnorm(freeze_statistics(net))
    mean, var = (value(p) for p in net.collect_params(".*running.*").values())
    expected = 1 + (np.array([1, 3]) - mean) / np.sqrt(var + 1e-5)
    with autograd.record():
        y = net(x, mask).asnumpy().ravel()
    assert_all_near([y[:2], y[2:]], [expected, np.zeros(1)], "float32", 2)
    found = net(*inputs).tojson()
    assert '"Custom"' not in found and '"BatchNorm"' in found


def test_numpy_semantics():
    x = np.random.default_rng(0).normal(3, 2, (6, 3))
    expected = reference.forward(x, np.ones(3), np.zeros(3))[0]
    with mx.util.np_shape(True), mx.util.np_array(True):
        layer, data = nn.BatchNorm(in_channels=3), DATA.as_np_ndarray()
        net = SymbolBlock(layer(data), data, params=layer.collect_params())
        net.cast("float64")
        make_parallel(net, cpus(2)).initialize()
        recompute_statistics(net, [x])
        for frozen in False, True:
            freeze_statistics(net, frozen)
            with autograd.record():
                y = net(mx.np.array(x, dtype="float64"))
            assert_near(y.asnumpy(), expected, "float64", 6, scale=10)
