"""Converting, reverting and freezing, wherever a net has its batch normalization."""

import copy
import warnings
from functools import partial

from gluon_syncbn import (
    Devices,
    Monitor,
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
from mxnet.gluon import Block, HybridBlock, SymbolBlock, nn
from support import reference
from support.blocks import MXNETS_LAYER, gluon_1_only
from support.helpers import (
    MODES,
    assert_all_near,
    assert_near,
    cpus,
    imported,
    operators,
    set_mode,
    summed_grad,
    value,
    whole,
)

pytestmark = gluon_1_only("blocks take no symbols")

DATA = mx.sym.var("data")
IDENTITY = np.ones(3), np.zeros(3)  # gamma and beta
X = np.random.default_rng(0).normal(3, 2, (6, 3)).astype("float32")


def node(operator=mx.sym.BatchNorm, **options):
    options = {"name": "bn", "fix_gamma": False, "eps": 1e-5, **options}
    return SymbolBlock(operator(DATA, **options), DATA)


def two_nodes():
    """One layer, used twice, as a graph of our own layers that was exported."""
    layer = SyncBatchNorm(in_channels=3, num_devices=2)
    return SymbolBlock(layer(DATA) + 0 * layer(DATA), DATA)


KINDS = {
    "layer": nn.BatchNorm,
    "contrib": partial(MXNETS_LAYER, num_devices=1),
    "node": node,
    "contrib node": partial(node, mx.sym.contrib.SyncBatchNorm, key="k", ndev=1),
    "our nodes": two_nodes,
}


class Nets:
    """Two nets that share a child block, and shards of X."""

    def __init__(self, part, mode, contexts):
        self.part, self.devices = part, Devices(contexts)
        self.nets = [nn.HybridSequential(), nn.HybridSequential()]
        for net in self.nets:
            net.add(nn.HybridLambda("identity"), part, nn.HybridLambda("identity"))
            net.initialize(ctx=contexts)
            set_mode(net, mode)
            net(mx.nd.array(X, ctx=contexts[0]))
        for name, parameter in part.collect_params().items():
            is_one = name.endswith(("gamma", "var"))
            parameter.set_data(mx.nd.ones(3) if is_one else mx.nd.zeros(3))

    def statistics(self):
        """Return the running mean and variance on each device."""
        mx.nd.waitall()
        found = self.part.collect_params(".*(running|moving)_(mean|var)").values()
        return [[value(p, k) for p in found] for k in range(len(self.devices))]

    def check(self, kind):
        """Check outputs, and which statistics a call changes."""
        shards = self.devices.split(X)
        parts = [shard.asnumpy() for shard in shards]
        for net in self.nets:
            before = self.statistics()
            if kind == "prediction":
                ys = self.devices.map(net, shards)
            else:
                with autograd.record():
                    ys = self.devices.map(net, shards)
                # MXNet's own layer trains its statistics there.
                self.devices.map(lambda y: y.backward(), ys)
            trains = kind in ("whole", "alone")
            assert np.array_equal(before, self.statistics()) != trains
            if not trains:
                right = [
                    reference.inference_forward(part, *IDENTITY, *statistics)
                    for part, statistics in zip(parts, before)
                ]
            else:
                together = [X] if kind == "whole" else parts
                right = [reference.forward(x, *IDENTITY)[0] for x in together]
            assert_near(whole(ys), np.concatenate(right), count=6, scale=10)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_nets_that_were_called(kind, mode, count):
    nets = Nets(KINDS[kind](), mode, cpus(count))
    nets.check("prediction")
    if "contrib" not in kind and kind != "our nodes":
        nets.check("alone")
        nets.check("prediction")
    convert_sync_batchnorm(nets.part, count)
    nets.check("whole")
    nets.check("prediction")
    freeze_statistics(nets.part)
    nets.check("frozen")
    freeze_statistics(nets.part, False)
    nets.check("whole")
    convert_sync_batchnorm(nets.part, count, nonfinite="skip")
    before = nets.statistics()
    with autograd.record():
        nets.devices.map(nets.nets[0], nets.devices.split(X * np.nan))
    assert np.array_equal(before, nets.statistics())
    revert_sync_batchnorm(nets.part)
    nets.check("alone")
    assert {"Custom", "_contrib_SyncBatchNorm"}.isdisjoint(operators(nets.nets[0]))
    freeze_statistics(nets.part)
    nets.check("frozen")
    convert_sync_batchnorm(nets.part, count)
    nets.check("frozen")
    assert "Custom" not in operators(nets.nets[0])
    freeze_statistics(nets.part, False)
    nets.check("whole")


@pytest.mark.parametrize("kind", ["layer", "node"])
def test_a_monitor_outlives_its_layers(kind):
    nets = Nets(KINDS[kind](), "hybridize", cpus(2))
    convert_sync_batchnorm(nets.part, 2)
    monitor = Monitor(nets.nets[0])
    for _ in monitor.data(range(2)):
        nets.check("whole")
    revert_sync_batchnorm(nets.part)
    assert "2 steps" in monitor.report()


def test_a_copy_has_layers_of_its_own():
    net = convert_sync_batchnorm(node(), 2)
    twin = copy.deepcopy(net)
    freeze_statistics(net)
    keys = [layer.key for net in (net, twin) for layer in synchronized_layers(net)]
    assert len(set(keys)) == 2 and "Custom" in operators(twin)
    assert keys[1] in twin(DATA).tojson()


def twins():
    a = nn.BatchNorm(in_channels=3)
    return a, nn.BatchNorm(in_channels=3, params=a.params)


class Branches(HybridBlock):
    """Two layers on one set of parameters, neither of which waits for the other."""

    def __init__(self):
        super().__init__()
        self.a = nn.BatchNorm(in_channels=3)
        self.b = nn.BatchNorm(in_channels=3, params=self.a.params)

    def hybrid_forward(self, F, x):
        return self.a(x) + self.b(F.tanh(x))


def branches_of_a_graph():
    net = Branches()
    return SymbolBlock(net(DATA), DATA)


@pytest.mark.parametrize("make", [Branches, branches_of_a_graph])
@pytest.mark.parametrize("mode", MODES)
def test_statistics_that_layers_share(make, mode):
    for _ in range(10 if mode == "static_shape" else 2):
        net = make_parallel(make(), cpus(2))
        net.initialize()
        set_mode(net, mode)
        for _ in range(5):
            with autograd.record():
                loss = net(mx.nd.random.normal(1, 2, shape=(12, 3)))
            loss.backward()
        check_replicas(net)


# ---- What is not reached is named.


class Own(HybridBlock):
    """A block that calls F.BatchNorm itself."""

    def __init__(self):
        super().__init__(prefix="own_")
        for name in "gamma", "beta", "running_mean", "running_var":
            setattr(self, name, self.params.get(name, shape=(1,), init="ones"))

    def hybrid_forward(self, F, x, **parameters):
        names = "gamma", "beta", "running_mean", "running_var"
        return F.BatchNorm(x, *map(parameters.get, names))


class Listed(Block):
    def __init__(self):
        super().__init__()
        self.norms = [nn.BatchNorm(in_channels=1, prefix="own_")]
        self.params.update(self.norms[0].collect_params())

    def forward(self, x):
        return self.norms[0](x)


def with_mean_that_is_read():
    y, mean, _ = mx.sym.BatchNorm(DATA, name="own", output_mean_var=True)
    return SymbolBlock([y, mean], DATA)


def with_computed_gamma():
    variables = (mx.sym.var(f"own_{name}") for name in ("moving_mean", "moving_var"))
    gamma = mx.sym.BlockGrad(mx.sym.var("gamma"))
    return SymbolBlock(
        mx.sym.BatchNorm(DATA, gamma, mx.sym.var("beta"), *variables, name="own"), DATA
    )


OTHERS = {
    "own operator": Own,
    "list": Listed,
    "mean is read": with_mean_that_is_read,
    "computed gamma": with_computed_gamma,
}
ACTIONS = {
    "convert": convert_sync_batchnorm,
    "make_parallel": partial(make_parallel, ctx=cpus(1)),
    "recompute": lambda net: recompute_statistics(net, [mx.nd.ones((2, 1))]),
    "freeze": freeze_statistics,
}


@pytest.mark.filterwarnings("ignore:.*unregistered container")
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("other", OTHERS)
def test_what_is_not_reached_is_named(other, action):
    net = nn.Sequential()
    net.add(nn.BatchNorm(in_channels=1), OTHERS[other]())
    net.initialize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ACTIONS[action](net)
    caught = [w for w in caught if w.filename == __file__]
    texts = [str(w.message) for w in caught if "own" in str(w.message)]
    # MXNet's own node can be frozen wherever its parameters are from.
    is_reached = action == "freeze" and isinstance(net[1], SymbolBlock)
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
    "bad, words",
    [
        (partial(nn.BatchNorm, momentum=-0.1, prefix="bad_"), "momentum .*bad.*-0.1"),
        (partial(node, name="bad", momentum=-0.1), "momentum .*bad.*-0.1"),
        (partial(node, name="bad", axis=7), "axis .*bad.*4.*7"),
        (partial(nn.BatchNorm, axis=7, prefix="bad_"), "axis .*bad.*4.*7"),
    ],
)
@pytest.mark.parametrize(
    "act", [convert_sync_batchnorm, partial(make_parallel, ctx=cpus(2))]
)
def test_a_bad_setting_changes_nothing(act, bad, words):
    net, bad = nn.HybridSequential(), bad()
    net.add(nn.BatchNorm(), node(), bad, nn.BatchNorm())
    net.initialize(ctx=cpus(2))
    before = [type(child) for child in net], operators(net[1]), operators(bad)
    with pytest.raises(ValueError, match=words):
        act(net)
    assert before == ([type(child) for child in net], operators(net[1]), operators(bad))


def test_a_graph_needs_the_number_of_its_devices():
    with pytest.raises(ValueError, match="bn.*initialize"):
        convert_sync_batchnorm(node())
    net = node()
    net.initialize(ctx=cpus(2))
    (layer,) = synchronized_layers(convert_sync_batchnorm(net))
    assert layer.num_devices == 2


# ---- Gradients, gamma and masks.


def heads(normalization):
    """Return an imperative net, a hybrid one and a graph with MXNet's loss operator."""
    options = {"normalization": normalization, "use_ignore": True}

    class Net(HybridBlock):
        def __init__(self):
            super().__init__()
            self.dense = nn.Dense(3, in_units=2, use_bias=False)

        def hybrid_forward(self, F, x, y):
            return F.SoftmaxOutput(self.dense(x), y, **options)

    hybrid, data, label = Net(), DATA, mx.sym.var("label")
    hybrid.hybridize()
    weight = mx.sym.FullyConnected(data, num_hidden=3, no_bias=True)
    graph = SymbolBlock(mx.sym.SoftmaxOutput(weight, label, **options), [data, label])
    return Net(), hybrid, graph


@pytest.mark.parametrize("normalization", ["null", "batch", "valid"])
def test_a_gradient_that_is_divided_by_rows(normalization):
    for net in heads(normalization):
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


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("kind", ["layer", "node"])
def test_gamma_that_is_not_used_is_1_in_files(kind, fixed):
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


class Masked(HybridBlock):
    def __init__(self):
        super().__init__()
        self.norm = SyncBatchNorm(axis=-1, in_channels=1)

    def hybrid_forward(self, F, x, mask):
        return self.norm(x, mask)


def test_a_graph_with_a_mask(tmp_path):
    """It is converted and frozen, but not reverted, as BatchNorm takes no mask."""
    x, mask = mx.nd.array([[[1.0], [3.0], [999.0]]]), mx.nd.array([[1, 1, 0]])
    net = Masked()
    net.initialize()
    net.hybridize()
    net(x, mask)
    net.export(str(tmp_path / "net"))
    net = imported(tmp_path / "net", "data0", "data1")
    for _ in range(2):
        with autograd.record():
            y = net(x, mask)
        np.testing.assert_allclose(y.asnumpy().ravel(), [-1, 1, 0], atol=1e-4)
        with pytest.raises(ValueError, match="batchnorm"):
            revert_sync_batchnorm(net)
        convert_sync_batchnorm(net)
    mx.nd.waitall()
    revert_sync_batchnorm(freeze_statistics(net))
    mean, var = (value(p) for p in net.collect_params(".*running.*").values())
    expected = (np.array([1, 3]) - mean) / np.sqrt(var + 1e-5)
    with autograd.record():
        y = net(x, mask).asnumpy().ravel()
    assert_all_near([y[:2], y[2:]], [expected, np.zeros(1)], "float32", 2)
    found = net(mx.sym.var("data0"), mx.sym.var("data1")).tojson()
    assert '"Custom"' not in found and '"BatchNorm"' in found


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("norm", [nn.BatchNorm, SyncBatchNorm])
def test_numpy_semantics(norm, count, tmp_path):
    with mx.util.np_shape(True), mx.util.np_array(True):
        net = nn.HybridSequential()
        net.add(norm(in_channels=3))
        net.initialize()
        net.hybridize()
        net(mx.np.ones((2, 3)))
        net.export(str(tmp_path / "net"))
        net = imported(tmp_path / "net", ctx=cpus(count))
        try:
            net(mx.np.ones((2, 3)))
        except TypeError as error:
            pytest.skip(f"MXNet 1.6 imports no graphs of NumPy's arrays: {error}")
        net.cast("float64")
        make_parallel(net, cpus(count))
        x = mx.np.array(X, dtype="float64")
        right, mean, var, _ = reference.forward(X, *IDENTITY)
        with autograd.record():
            y = net(x).asnumpy()
        assert_near(y, right, "float64", 6, scale=10)
        recompute_statistics(net, [X])
        found = [value(p) for p in net.collect_params(".*running.*").values()]
        assert_all_near(found, [mean, var], count=6)
        freeze_statistics(net)
        with autograd.record():
            assert_near(net(x).asnumpy(), right, "float64", 6, scale=10)
        revert_sync_batchnorm(freeze_statistics(net, False))
        assert_near(net(x).asnumpy(), right, "float64", 6, scale=10)
