"""Every kind of layer is converted, reverted and frozen, or a warning names it."""

import copy
import warnings
from functools import partial

from gluon_syncbn import (
    Devices,
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
from support.blocks import MXNETS_LAYER, Same, gluon_1_only
from support.helpers import (
    MODES,
    assert_all_near,
    assert_near,
    cpus,
    differentiate,
    operators,
    ready,
    set_mode,
    value,
    whole,
)

pytestmark = gluon_1_only("blocks take no symbols")

DATA, IDENTITY = mx.sym.var("data"), reference.IDENTITY
# BatchNormWithReLU needs four axes.
X = np.random.default_rng(0).normal(3, 2, (6, 3, 1, 1)).astype("float32")


def node(operator=mx.sym.BatchNorm, **options):
    options = {"name": "bn", "fix_gamma": False, **options}
    return SymbolBlock(operator(DATA, **options), DATA)


def two_nodes():
    """Return a graph that uses one of our layers twice."""
    layer = SyncBatchNorm(in_channels=3, num_devices=2)
    return SymbolBlock(layer(DATA) + 0 * layer(DATA), DATA)


CONTRIB = {"key": "k", "ndev": 1, "eps": 1e-5}
KINDS = {
    "layer": nn.BatchNorm,
    "contrib": partial(MXNETS_LAYER, num_devices=1),
    "leaky": partial(SyncBatchNorm, activation="leaky_relu"),
    "node": node,  # the default of eps is 1e-3
    "contrib node": partial(node, mx.sym.contrib.SyncBatchNorm, **CONTRIB),
    "our nodes": two_nodes,
    "leaky node": lambda: SymbolBlock(KINDS["leaky"]()(DATA), DATA),
}
if hasattr(nn, "BatchNormReLU"):  # new in MXNet 1.8
    KINDS["relu"] = nn.BatchNormReLU
    KINDS["relu node"] = partial(node, mx.sym.contrib.BatchNormWithReLU, eps=1e-5)


class Nets:
    """Two nets that share a child block."""

    def __init__(self, kind, mode, contexts):
        self.child, self.devices = KINDS[kind](), Devices(contexts)
        self.activation = kind.split()[0] + "_relu" * kind.startswith("leaky")
        self.eps = 1e-3 if kind == "node" else 1e-5
        self.nets = [nn.HybridSequential(), nn.HybridSequential()]
        for net in self.nets:
            net.add(Same(), self.child, Same())
            net.initialize(ctx=contexts)
            set_mode(net, mode)
            net(mx.nd.array(X, ctx=contexts[0]))
        for name, parameter in self.child.collect_params().items():
            is_one = name.endswith(("gamma", "var"))
            parameter.set_data(mx.nd.ones(3) if is_one else mx.nd.zeros(3))

    def statistics(self):
        """Return the running mean and variance on each device."""
        mx.nd.waitall()
        found = self.child.collect_params(".*(running|moving)_(mean|var)").values()
        return [[value(p, k) for p in found] for k in range(len(self.devices))]

    def check(self, call):
        """Check the outputs and running statistics of both nets."""
        shards = self.devices.split(X)
        arrays = [shard.asnumpy() for shard in shards]
        for net in self.nets:
            before = self.statistics()
            if call == "prediction":
                ys = self.devices.map(net, shards)
            else:
                with autograd.record():
                    ys = self.devices.map(net, shards)
                # MXNet's own layer updates its statistics in backward.
                self.devices.map(lambda y: y.backward(), ys)
            uses_batch = call in ("synchronized", "separate")
            assert np.array_equal(before, self.statistics()) != uses_batch
            expected = []
            for x, running in zip([X] if call == "synchronized" else arrays, before):
                if uses_batch:
                    y = reference.forward(x, *IDENTITY, 1, self.eps)[0]
                else:
                    mean, var = np.float64(running)[:, :, None, None]
                    y = (x - mean) / np.sqrt(var + self.eps)
                expected.append(y)
            expected = np.concatenate(expected)
            if self.activation in ("relu", "leaky_relu"):  # other kinds have none
                expected = reference.activate(expected, self.activation, slope=0.01)
            assert_near(whole(ys), expected, count=6, scale=10)


@pytest.mark.parametrize(
    "mode, count",
    [("static_alloc", 1), ("imperative", 2), ("hybridize", 2), ("static_shape", 2)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_child_block_of_two_nets(kind, mode, count):
    nets = Nets(kind, mode, cpus(count))
    original, text = type(nets.child), repr(nets.child)
    nets.check("prediction")
    if kind in ("layer", "relu", "node", "relu node"):
        nets.check("separate")
        nets.check("prediction")
    convert_sync_batchnorm(nets.child, count)
    nets.check("synchronized")
    nets.check("prediction")
    freeze_statistics(nets.child)
    nets.check("frozen")
    freeze_statistics(nets.child, False)
    nets.check("synchronized")
    convert_sync_batchnorm(nets.child, count, nonfinite="skip")
    before = nets.statistics()
    with autograd.record():
        nets.devices.map(nets.nets[0], nets.devices.split(X * np.nan))
    assert np.array_equal(before, nets.statistics())
    revert_sync_batchnorm(nets.child)
    nets.check("separate")
    if kind in ("layer", "relu"):
        assert (type(nets.child), repr(nets.child)) == (original, text)
    found = {*operators(nets.nets[0])}
    assert found.isdisjoint({"Custom", "_contrib_SyncBatchNorm", "SliceChannel"})
    freeze_statistics(nets.child)
    nets.check("frozen")
    convert_sync_batchnorm(nets.child, count)
    nets.check("frozen")
    assert "Custom" not in operators(nets.nets[0])
    freeze_statistics(nets.child, False)
    nets.check("synchronized")
    revert_sync_batchnorm(nets.child)
    nets.check("separate")


@pytest.mark.parametrize("kind", ["contrib", "contrib node"])
def test_mxnets_synchronized_layer_is_reverted(kind):
    nets = Nets(kind, "hybridize", cpus(1))
    revert_sync_batchnorm(nets.child)
    nets.check("separate")
    assert "_contrib_SyncBatchNorm" not in operators(nets.nets[0])


# ---- A warning names batch normalization that cannot be converted.


class Own(HybridBlock):
    """A block that calls F.BatchNorm itself."""

    NAMES = "gamma", "beta", "running_mean", "running_var"

    def __init__(self):
        super().__init__(prefix="own_")
        for name in self.NAMES:
            setattr(self, name, self.params.get(name, shape=(1,), init="ones"))

    def hybrid_forward(self, F, x, **parameters):
        return F.BatchNorm(x, *map(parameters.get, self.NAMES))


def with_mean_that_is_read():
    y, mean, _ = mx.sym.BatchNorm(DATA, name="own", output_mean_var=True)
    return SymbolBlock([y, mean], DATA)


def with_computed_gamma():
    return node(gamma=mx.sym.BlockGrad(mx.sym.var("gamma")), name="own")


ACTIONS = [
    convert_sync_batchnorm,
    lambda net: recompute_statistics(net, [mx.nd.ones((2, 1))]),
    freeze_statistics,
]


@pytest.mark.parametrize("act", ACTIONS)
@pytest.mark.parametrize("other", [Own, with_mean_that_is_read, with_computed_gamma])
def test_what_is_not_reached_is_named(other, act):
    net = nn.Sequential()
    net.add(nn.BatchNorm(in_channels=1), other())
    net.initialize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act(net)
    caught = [w for w in caught if w.filename == __file__]
    texts = [str(w.message) for w in caught if "own" in str(w.message)]
    # A BatchNorm node of MXNet can be frozen even if its parameters are computed.
    is_reached = act is freeze_statistics and isinstance(net[1], SymbolBlock)
    assert len(texts) == (not is_reached)
    if is_reached:
        assert '"use_global_stats": "True"' in net[1](DATA)[0].tojson()


def test_a_net_without_batch_normalization(recwarn):
    make_parallel(nn.Dense(1), ctx=cpus(1))
    revert_sync_batchnorm(nn.Dense(1))
    assert not recwarn
    for act in convert_sync_batchnorm, freeze_statistics:
        with pytest.warns(UserWarning, match="dense0"):
            act(nn.Dense(1, prefix="dense0_"))


@pytest.mark.parametrize(
    "bad, pattern",
    [
        (partial(node, name="bad", momentum=-0.1), "momentum .*bad.*-0.1"),
        (partial(nn.BatchNorm, axis=7, prefix="bad_"), "axis .*bad.*4.*7"),
    ],
)
def test_a_bad_setting_changes_nothing(bad, pattern):
    net, bad = nn.HybridSequential(), bad()
    net.add(nn.BatchNorm(), bad, node(), nn.BatchNorm())
    net.initialize(ctx=cpus(2))
    before = [type(child) for child in net], operators(bad), operators(net[2])
    with pytest.raises(ValueError, match=pattern):
        convert_sync_batchnorm(net)
    assert before == ([type(child) for child in net], operators(bad), operators(net[2]))


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("kind", ["layer", "node"])
def test_an_unused_gamma_becomes_1(kind, fixed):
    for act in convert_sync_batchnorm, revert_sync_batchnorm:
        net = nn.BatchNorm(scale=not fixed, in_channels=3)
        if kind == "node":
            net = SymbolBlock(net(DATA), DATA)
        net.initialize()
        convert_sync_batchnorm(net)
        net(mx.nd.ones((2, 3)))
        (gamma,) = net.collect_params(".*gamma").values()
        gamma.set_data(mx.nd.ones(3) * 3)
        act(net)
        assert (gamma.data() == (1 if fixed else 3)).asnumpy().all()


# ---- SymbolBlocks.


def test_a_copy_has_layers_of_its_own():
    net = convert_sync_batchnorm(node(), 2)
    twin = copy.deepcopy(net)
    freeze_statistics(net)
    keys = [x._sync.key for net in (net, twin) for x in synchronized_layers(net)]
    assert len(set(keys)) == 2 and "Custom" in operators(twin)
    assert keys[1] in twin(DATA).tojson()


def test_a_trainer_waits_for_the_layers_of_a_graph():
    net = ready(SymbolBlock(SyncBatchNorm(in_channels=1)(DATA), DATA))
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
            differentiate(net, mx.nd.random.normal(1, 2, shape=(12, 3)))
        check_replicas(net)


def test_a_graph_with_a_mask():
    """A graph with a mask can only be reverted while its statistics are frozen."""
    x, mask = mx.nd.array([[[1.0], [3.0], [999.0]]]), mx.nd.array([[1, 1, 0]])
    inputs = DATA, mx.sym.var("mask")
    symbol = SyncBatchNorm(axis=2, in_channels=1, num_devices=1)(*inputs)
    net = SymbolBlock(symbol, inputs)
    net.initialize(mx.init.One())  # beta is also 1
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


@pytest.mark.skipif(mx.__version__ < "1.7", reason="no SymbolBlock of mx.np in 1.6")
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
