"""Activation blocks are folded into the layers in front of them, and unfolded again."""

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, nn
from support.blocks import gluon_1_only
from support.helpers import MODES, assert_all_near, set_mode

traces = gluon_1_only("nets are not traced without arrays")


class Net(HybridBlock):
    """A net with activations that can be folded beside others that cannot."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.foldable, self.behind = nn.BatchNorm(), nn.LeakyReLU(0.25)
            self.inner = nn.HybridSequential()
            self.inner.add(nn.Conv2D(3, 1), nn.BatchNorm(), nn.Activation("relu"))
            self.inner.add(nn.Conv2D(3, 1), nn.BatchNorm(), nn.ELU(0.5))
            self.read_twice, self.one_reader = nn.BatchNorm(), nn.LeakyReLU(0.125)
            self.first, self.second = nn.BatchNorm(), nn.BatchNorm()
            self.shared = nn.Activation("relu")
            self.other = nn.BatchNorm()
            self.function = nn.BatchNorm()
            self.sigmoid, self.unfolded = nn.BatchNorm(), nn.Activation("sigmoid")
            self.twice = nn.BatchNorm()
            self.left, self.right = nn.LeakyReLU(0.5), nn.LeakyReLU(0.25)

    def hybrid_forward(self, F, x):
        x = self.inner(self.behind(self.foldable(x)))
        y = self.read_twice(x)
        x = self.one_reader(y) + y
        x = self.shared(self.first(x)) + self.shared(self.second(x))
        x = F.relu(self.function(x)) + self.unfolded(self.sigmoid(x))
        return self.right(self.twice(self.left(self.twice(x)))), self.other(x)


class Controlled(Block):
    """A net that no symbol goes through, and that reads what is inside of a child."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.features = nn.HybridSequential()
            self.features.add(nn.BatchNorm(), nn.LeakyReLU(0.25))

    def forward(self, x):
        if x.shape[0] > 1:
            x = self.features[0](x)
        return x, self.features[1](x)


def initialized(net):
    mx.random.seed(3)
    net.cast("float64")
    net.initialize(mx.init.Normal(0.7))
    net(mx.nd.random.normal(shape=(2, 3, 4, 5), dtype="float64"))
    for name, parameter in net.collect_params(".*(gamma|beta)").items():
        values = np.random.default_rng(len(name)).normal(size=parameter.shape)
        parameter.set_data(mx.nd.array(values))
    return net


def values_of(net, mode="imperative"):
    """Outputs and gradients of a training step."""
    set_mode(net, mode)
    x = mx.nd.array(np.random.default_rng(5).normal(size=(4, 3, 4, 5)), dtype="float64")
    x.attach_grad()
    with autograd.record():
        outputs = net(x)
        if not isinstance(outputs, (list, tuple)):
            outputs = [outputs]
        loss = sum((y * y).sum() for y in outputs)
    loss.backward()
    grads = [p.grad() for p in net.collect_params().values() if p.grad_req != "null"]
    return [v.asnumpy() for v in (*outputs, x.grad, *grads)]


def activations(net):
    """Each layer's built-in activation, by the end of its name."""
    found = {}

    def visit(block):
        if isinstance(block, SyncBatchNorm):
            found[block.name.split("_", 1)[1]] = block.activation
        if isinstance(block, gluon_syncbn.layer.fusion.Folded):
            found[block.name.split("_", 1)[1]] = "folded"

    net.apply(visit)
    return found


def assert_same(results, expected):
    assert len(results) > 2
    # In float64, but for MXNet's LeakyReLU, which takes negative values through
    # float32 (src/operator/mshadow_op.h).
    assert_all_near(results, expected, "float32", scale=10)


@traces
@pytest.mark.parametrize("mode", MODES)
def test_folds_what_it_may_and_computes_the_same(mode):
    net = convert_sync_batchnorm(initialized(Net()), 1)
    expected, names = values_of(net, mode), list(net._collect_params_with_prefix())
    convert_sync_batchnorm(net, 1, fuse=True)
    found = activations(net)
    folded = {name for name, kind in found.items() if kind == "folded"}
    assert set(found.values()) == {"leaky_relu", "relu", None, "folded"}
    layers = net.foldable, net.inner[1], net.inner[4]
    assert [b.activation for b in layers] == ["leaky_relu", "relu", None]
    assert len(folded) == 2 and repr(net.behind) == "Folded(leaky_relu, 0.25)"
    assert type(net.inner[5]) is nn.ELU
    rest = net.read_twice, net.first, net.second, net.other, net.function, net.sigmoid
    assert {layer.activation for layer in (*rest, net.twice)} == {None}
    assert list(net._collect_params_with_prefix()) == names
    assert_same(values_of(net, mode), expected)


@traces
def test_a_sequential_that_cannot_be_traced_is_taken_apart():
    net = nn.Sequential()
    net.add(nn.Lambda(lambda x: x if x.shape[0] else -x), Net())
    net.add(nn.Lambda(lambda outputs: outputs[0]), nn.BatchNorm(), nn.LeakyReLU(0.25))
    expected = values_of(convert_sync_batchnorm(initialized(net), 1))
    convert_sync_batchnorm(net, 1, fuse=True)
    assert net[1].foldable.activation == "leaky_relu"
    assert net[3].activation is None and type(net[4]) is nn.LeakyReLU
    assert_same(values_of(net), expected)


@traces
def test_what_reads_the_inside_of_a_child_stays_with_a_warning():
    net = initialized(Controlled())
    expected = values_of(convert_sync_batchnorm(net, 1))
    with pytest.warns(UserWarning, match="keeps its activation blocks") as warned:
        convert_sync_batchnorm(net, 1, fuse=True)
    assert len(warned) == 1
    assert set(activations(net).values()) == {None}
    assert_same(values_of(net), expected)


def test_sequentials_of_numpy_arrays():
    """All that is fused in MXNet 2."""
    with mx.util.np_shape(True), mx.util.np_array(True):
        net, inner, shared = (
            nn.HybridSequential(),
            nn.HybridSequential(),
            nn.BatchNorm(),
        )
        inner.add(nn.Conv2D(3, 1), nn.BatchNorm(), nn.Activation("relu"), shared)
        net.add(nn.BatchNorm(), nn.LeakyReLU(0.25), inner, shared, nn.LeakyReLU(0.5))
        net.initialize(mx.init.Normal(0.7))
        x = mx.np.random.normal(size=(4, 3, 4, 5))
        before = convert_sync_batchnorm(net, 1)(x).asnumpy()
        convert_sync_batchnorm(net, 1, fuse=True)
        assert [net[0].activation, inner[1].activation] == ["leaky_relu", "relu"]
        assert shared.activation is None and type(net[4]) is nn.LeakyReLU
        np.testing.assert_allclose(net(x).asnumpy(), before, 1e-5, 1e-6)
        revert_sync_batchnorm(net)
        assert type(net[1]) is nn.LeakyReLU and type(inner[2]) is nn.Activation


@traces
def test_a_part_is_reverted_if_it_holds_both_and_then_the_rest():
    net = initialized(Net())
    text, expected = repr(net), values_of(net)
    convert_sync_batchnorm(net, 1, fuse=True)
    with pytest.raises(ValueError, match="fused with .*, which is not part of"):
        revert_sync_batchnorm(net.foldable)
    assert net.foldable.activation == "leaky_relu"
    revert_sync_batchnorm(net.inner)
    assert type(net.inner[2]) is nn.Activation and type(net.inner[1]) is nn.BatchNorm
    assert repr(net.behind) == "Folded(leaky_relu, 0.25)"
    assert_same(values_of(net), expected)
    revert_sync_batchnorm(net)
    assert repr(net) == text
    assert_same(values_of(net), expected)


@pytest.mark.parametrize("name, count", [("resnet18_v1b", 9), ("darknet53", 52)])
def test_nets_of_gluoncv(name, count):
    model_zoo = pytest.importorskip("gluoncv", reason="needs GluonCV").model_zoo
    net = model_zoo.get_model(name, pretrained=False)
    convert_sync_batchnorm(net, 2, fuse=True)
    found = list(activations(net).values())
    assert found.count("folded") == count
    assert found.count("relu") + found.count("leaky_relu") == count
