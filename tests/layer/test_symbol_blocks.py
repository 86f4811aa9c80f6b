"""SymbolBlocks: layers that are nodes in a graph, made as ours or converted."""

import gc
import re
from functools import partial

from gluon_syncbn import (
    SyncBatchNorm,
    check_replicas,
    convert_sync_batchnorm,
    freeze_statistics,
    make_parallel,
    revert_sync_batchnorm,
)
from gluon_syncbn.layer.finding import synchronized_layers

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import SymbolBlock, Trainer, nn
from support.blocks import MXNETS_LAYER, gluon_1_only
from support.helpers import (
    assert_all_near,
    assert_near,
    cpus,
    operators,
    output_of,
    set_mode,
)

pytestmark = gluon_1_only("blocks take no symbols")

SHAPE = 3, 7, 6


def features(norm):
    """Make a symbol of a block and more operators, as GluonCV's SSD does."""
    block = nn.HybridSequential(prefix="features_")
    norms = [norm(momentum=0.875, prefix=f"features_norm{k}_") for k in range(2)]
    with block.name_scope():
        block.add(nn.Conv2D(4, 3, use_bias=False), norms[0], nn.Activation("relu"))
        block.add(nn.Conv2D(5, 2, use_bias=False), norms[1])
    arguments = {"num_filter": 4, "kernel": (1, 1), "no_bias": True}
    symbol = block(mx.sym.var("data"))
    symbol = mx.sym.Convolution(symbol, **arguments, name="more_conv")
    more = mx.sym.BatchNorm(symbol, name="more_bn", momentum=0.875)
    return mx.sym.Group([symbol, mx.sym.tanh(more)])


def with_symbol_block(norm):
    """Make a hybrid net around a SymbolBlock."""
    net = nn.HybridSequential(prefix="net_")
    net.add(nn.HybridLambda(lambda F, x: x * 2))
    net.add(SymbolBlock(features(norm), mx.sym.var("data")))
    net.add(nn.HybridLambda(lambda F, pair: F.concat(*pair, dim=1)))
    return net


def initialize(net, contexts):
    """Set float64 values that do not depend on the order of the parameters."""
    net.cast("float64")
    net.initialize(ctx=contexts)
    net(mx.nd.ones((2, *SHAPE), ctx=contexts[0], dtype="float64"))
    for name, parameter in sorted(net.collect_params().items()):
        rng = np.random.default_rng(len(name))
        values = 1 + 0.5 * rng.random(parameter.shape)
        if name == "more_bn_gamma":
            values[:] = 1  # it is fixed: MXNet's operator would set it
        parameter.set_data(mx.nd.array(values, dtype="float64"))
    return net


def steps(net, rows):
    """Train; return the outputs of all steps and the parameters after them."""
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    rng, results = np.random.default_rng(1), []
    for n in rows:
        x = mx.nd.array(rng.normal(1, 2, (n, *SHAPE)), dtype="float64")
        weights = mx.nd.array(rng.normal(size=(n, 8, 4, 3)), dtype="float64")
        with autograd.record():
            y = net(x)
            total = (y * weights).sum()
        total.backward()
        trainer.step(n)
        results.append(y.asnumpy())
    mx.nd.waitall()
    parameters = sorted(net.collect_params().items())
    return results + [p.list_data()[0].asnumpy() for _, p in parameters]


def assert_same(results, expected):
    assert_all_near(results, expected, count=500, scale=10)


# Rows per step: split unevenly, for one device only, split evenly.
ROWS = [5, 1, 4, 1]
NORMS = {"ours": SyncBatchNorm, "plain": nn.BatchNorm, "contrib": MXNETS_LAYER}


@pytest.mark.parametrize(
    "norm, mode",
    [("ours", "imperative"), ("plain", "static_shape"), ("contrib", "hybridize")],
)
def test_trains_in_parallel_like_one_device(norm, mode):
    expected = steps(initialize(with_symbol_block(nn.BatchNorm), cpus(1)), ROWS)
    net = with_symbol_block(NORMS[norm])
    parallel = set_mode(make_parallel(net, cpus(2)), mode)
    assert operators(net).count("Custom") == 3
    initialize(net, cpus(2))
    assert_same(steps(parallel, ROWS), expected)
    check_replicas(parallel)


def test_layers_that_were_never_converted_take_part(devices):
    net = initialize(
        with_symbol_block(lambda **k: SyncBatchNorm(num_devices=2, **k)), cpus(2)
    )
    layers = synchronized_layers(net)
    assert [layer.name for layer in layers] == ["features_norm0", "features_norm1"]
    x = mx.nd.ones((2, *SHAPE), dtype="float64")
    with autograd.record():
        gc.collect()  # the blocks that the nodes were made of
        devices.map(net, devices.split(x))
    mx.nd.waitall()


LEAKY_RELU = partial(SyncBatchNorm, activation="leaky_relu", slope=0.25)
RELU = partial(SyncBatchNorm, activation="relu")


@pytest.mark.parametrize("norm", [nn.BatchNorm, RELU, LEAKY_RELU])
def test_converted_twice_and_reverted(norm):
    """A reverted graph holds no operator of the package, guards included."""
    net = initialize(with_symbol_block(norm), cpus(1))
    x = mx.nd.random.normal(shape=(2, *SHAPE), dtype="float64")
    y = net(x).asnumpy()
    for count in (1, 2):
        convert_sync_batchnorm(net, num_devices=count)
        assert operators(net).count("Custom") == 3
    assert_same([net(x).asnumpy()], [y])
    freeze_statistics(net)
    assert "Custom" not in operators(net)
    # MXNet computes a LeakyReLU in float32.
    dtype = "float32" if norm is LEAKY_RELU else "float64"
    assert_all_near([net(x).asnumpy()], [y], dtype, count=500, scale=10)
    freeze_statistics(net, False)
    assert operators(net).count("Custom") == 3
    found = operators(revert_sync_batchnorm(net))
    assert found.count("BatchNorm") == 3
    assert not {"Custom", "SliceChannel"} & set(found)
    assert_all_near([net(x).asnumpy()], [y], dtype, count=500, scale=10)
    if norm is LEAKY_RELU:
        graph = mx.sym.Group(list(net(mx.sym.var("data")))).attr_dict()
        slopes = [node["slope"] for node in graph.values() if "slope" in node]
        assert slopes == ["0.25", "0.25"]


def converted_and_plain(operator, x, value):
    """Return outputs of a converted node and of the node, with equal parameters."""
    y = operator(mx.sym.var("data"), name="bn", fix_gamma=False)
    plain, ours = (SymbolBlock(y, mx.sym.var("data")) for _ in range(2))
    for net in (plain, ours):
        net.cast(x.dtype)
        net.initialize(mx.init.Constant(value))
    convert_sync_batchnorm(ours, num_devices=1)
    with autograd.train_mode():
        return ours(x).asnumpy(), plain(x).asnumpy()


@pytest.mark.skipif(
    not hasattr(mx.sym.contrib, "BatchNormWithReLU"), reason="MXNet 1.8 brought it"
)
def test_batch_norm_with_relu():
    x = mx.nd.random.normal(shape=(3, *SHAPE))
    outputs = converted_and_plain(mx.sym.contrib.BatchNormWithReLU, x, 0.5)
    assert_near(*outputs, scale=10)
    assert (outputs[0] == 0).any()


def test_epsilon_of_a_node_that_does_not_name_one():
    """MXNet takes a float32's 0.001, which float64 tells from 0.001."""
    x = 0.01 * mx.nd.random.normal(shape=(3, *SHAPE), dtype="float64")
    outputs = converted_and_plain(mx.sym.BatchNorm, x, 1.0)
    assert_near(*outputs, "float64", count=3 * 7 * 6)


MODULE = """
import sys, gluon_syncbn, numpy as np, mxnet as mx
from mxnet.gluon import nn
gluon_syncbn.set_timeout(3)
net = nn.HybridSequential()
for _ in range(20):
    net.add(nn.Conv2D(8, 3, padding=1), gluon_syncbn.SyncBatchNorm(num_devices=2))
    net.add(nn.Activation("relu"), nn.Dropout(0.1))
net.add(nn.Dense(2))
module = mx.mod.Module(
    mx.sym.SoftmaxOutput(net(mx.sym.var("data")), name="softmax"),
    context=[mx.cpu(0), mx.cpu(1)],
)
data = mx.io.NDArrayIter(np.ones((8, 3, 8, 8), "float32"), np.zeros(8), batch_size=8)
try:
    module.fit(data, num_epoch=1)
except mx.MXNetError as error:
    print(error)
"""


def test_a_module_over_several_contexts():
    line = 1 + next(k for k, x in enumerate(MODULE.split("\n")) if "fit(" in x)
    places = re.findall(r"\nThe program stands at <string>:(\d+)", output_of(MODULE))
    assert places == [str(line)]


def test_a_graph_outlives_the_block_that_it_was_traced_with(devices):
    """The block is collected between the calls for two contexts, as GluonCV's are."""
    blocks = [SyncBatchNorm(in_channels=1, num_devices=2, epsilon=0)]
    net = SymbolBlock(blocks[0](mx.sym.var("data")), mx.sym.var("data"))
    net.initialize(mx.init.One(), devices.contexts)

    def call(x):
        y = net(x)
        blocks.clear()
        gc.collect()
        return y

    xs = [mx.nd.array([[k]], ctx=c) for k, c in enumerate(devices.contexts)]
    with autograd.train_mode():
        ys = devices.map(call, xs)
    assert [y.asnumpy().item() for y in ys] == [0, 2]  # beta is 1
