"""recompute_statistics gives the statistics of all elements, however a net runs."""

import threading

from gluon_syncbn import SyncBatchNorm, make_parallel, recompute_statistics

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import SymbolBlock, nn
from mxnet.gluon.data import ArrayDataset, DataLoader
from support import reference
from support.blocks import Function, Same, gluon_1_only, in_threads, sharing
from support.helpers import (
    assert_all_near,
    assert_near,
    cpus,
    operators,
    ready,
    set_mode,
    value,
)
from support.nd import nd
from support.nets import Net

ROWS = 7, 1, 4  # one of two contexts gets no row of the second batch


def small_net(norm):
    net = nn.HybridSequential()
    net.add(Same(), norm(in_channels=3), nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D(), nn.Flatten(), norm(in_channels=3))
    return net


def batches_of(shape=(3, 6, 5), dtype="float64"):
    rng = np.random.default_rng(3)
    return [rng.normal(1, 2, (n, *shape)).astype(dtype) for n in ROWS]


def statistics(net, index=0):
    """Return the running means and variances on one context."""
    found = net.collect_params(".*running_(mean|var)").values()
    return [value(parameter, index) for parameter in found]


def oracle(batches):
    """Return the right `statistics` of a `small_net`."""
    ys = [reference.forward(batch, *reference.IDENTITY)[0] for batch in batches]
    found = []
    for inputs in batches, [np.maximum(y, 0).mean((2, 3)) for y in ys]:
        _, mean, var, _ = reference.forward(np.concatenate(inputs), *reference.IDENTITY)
        found += [mean, var]
    return found


def initialized(contexts, norm):
    net = small_net(norm)
    net.cast("float64")
    return ready(net, ctx=contexts)


def graph_of(contexts, norm):
    net, data = initialized(contexts, norm), mx.sym.var("data", dtype="float64")
    return SymbolBlock(net(data), data, params=net.collect_params())


def kinds_of(net):
    found = operators(net) if isinstance(net, SymbolBlock) else []
    net.apply(lambda block: found.append(type(block)))
    return found


KINDS = [
    (initialized, SyncBatchNorm),
    (initialized, nn.BatchNorm),
    pytest.param(graph_of, nn.BatchNorm, marks=gluon_1_only("blocks take no symbols")),
]


@pytest.mark.parametrize("mode", ["imperative", "static_shape"])
@pytest.mark.parametrize("way", ["one context", "Devices", "make_parallel"])
@pytest.mark.parametrize("make, norm", KINDS)
def test_equals_all_elements_together(make, norm, way, mode):
    """The second layer gets one value per channel from the batch of one row."""
    contexts = cpus(1 if way == "one context" else 2)
    net = make(contexts, norm)
    kinds = kinds_of(net)
    if way == "make_parallel":
        net = make_parallel(net, contexts, sync_bn=False)
    set_mode(net, mode)
    batches = batches_of()
    recompute_statistics(net, batches)
    for index in range(len(contexts)):
        found = statistics(net, index)
        assert_all_near(found, oracle(batches), count=sum(b.size for b in batches))
    assert kinds_of(net) == kinds


@pytest.mark.parametrize("unbiased", [False, True])
def test_both_divisors_in_float32(unbiased):
    """The mean is 500 times the standard deviation, so sums must be float64."""
    layer = ready(SyncBatchNorm(in_channels=2, unbiased_running_var=unbiased))
    batches = [1000 + batch for batch in batches_of(shape=(2,), dtype="float32")]
    recompute_statistics(layer, batches)
    right = np.concatenate(batches).astype("float64").var(axis=0, ddof=unbiased)
    limits = {"count": 12, "conditioning": 500, "scale": abs(right).max()}
    assert_near(value(layer.running_var), right, **limits)


def test_nothing_but_the_statistics_changes():
    net = small_net(SyncBatchNorm)
    net.add(nn.Dropout(0.5), nn.Dense(2, in_units=3), SyncBatchNorm(in_channels=2))
    net.initialize()
    net.hybridize()
    x = nd.array(batches_of()[0])
    with autograd.train_mode():
        net(x).wait_to_read()
    graph = net._cached_op
    batches = [nd.array(batch) for batch in batches_of()]
    with autograd.record():
        recompute_statistics(net, batches)
        assert autograd.is_recording() and autograd.is_training()
    first = statistics(net)
    recompute_statistics(net, batches)
    for value_now, before in zip(statistics(net), first):
        assert (value_now == before).all()
    assert net._cached_op is graph


@pytest.mark.parametrize("norm", [SyncBatchNorm, nn.BatchNorm])
def test_frozen_layers_keep_their_statistics(norm):
    net, x = nn.HybridSequential(), nd.array([[1.0], [3.0]])
    net.add(norm(in_channels=1, use_global_stats=True), nn.BatchNorm(in_channels=1))
    net.initialize()
    trainers = [mx.gluon.Trainer(net[1].collect_params(), "sgd")]
    recompute_statistics(net, [x])
    assert statistics(net[0]) == [0, 1]
    np.testing.assert_allclose(statistics(net[1]), [[2], [1]], rtol=1e-4)
    with pytest.raises(ValueError, match="frozen"):
        recompute_statistics(net[0], [x])
    trainers.append(mx.gluon.Trainer(net[1].collect_params(), "sgd"))
    # A trainer of a SyncBatchNorm, as net[1] was in between, would have another class.
    assert {*map(type, trainers)} == {mx.gluon.Trainer}


def test_a_layer_that_is_used_twice_counts_all_its_inputs():
    """The same holds for two layers that share their statistics."""
    layer = SyncBatchNorm(in_channels=1)

    class Twice(Function):
        def __init__(self, second):
            super().__init__()
            self.first, self.second = layer, second

        def compute(self, F, x):
            return self.first(x) + self.second(x + 2)

    for second in layer, sharing(layer, SyncBatchNorm, in_channels=1):
        net = Twice(second)
        layer.initialize(force_reinit=True)
        for _ in range(2):
            recompute_statistics(net, [nd.array([[1.0], [3.0]])])
            assert statistics(layer) == [3, 2]
            net.hybridize()


X = np.ones((4, 3, 6, 5), "float32")


@pytest.mark.filterwarnings("ignore:.*sync_bn=False")
@pytest.mark.parametrize(
    "batches, pattern",
    [
        ([X, X, X[:, :2]], "3 channels"),
        ([X, X * np.inf], "finite"),
        ([X, X * 1e21], "running_var.* finite"),  # only float64 can hold the variance
        ([], "batch"),
        ([X, X[:0]], r"axis 0, got 0|got shape \(0"),
    ],
)
@pytest.mark.parametrize("norm, count", [(SyncBatchNorm, 2), (nn.BatchNorm, 1)])
def test_an_error_changes_nothing(norm, count, batches, pattern):
    net = ready(make_parallel(small_net(norm), cpus(count), sync_bn=False))
    before = [statistics(net, k) for k in range(count)]
    with pytest.raises(ValueError, match=pattern):
        recompute_statistics(net, batches)
    for k in range(count):
        for now, then in zip(statistics(net, k), before[k]):
            assert (now == then).all()
    assert type(net[1]) is norm
    recompute_statistics(net, batches_of(dtype="float32"))  # a later call works
    with autograd.train_mode():
        net(nd.array(X)).wait_to_read()
    assert not (statistics(net)[0] == before[0][0]).all()


def test_batches_that_do_not_count():
    """A batch that is not finite is skipped, and batches after `steps` are not read."""
    layer = ready(SyncBatchNorm(in_channels=1, nonfinite="skip"))
    batches = iter([nd.array([[x]]) for x in (1.0, np.inf, 3.0, 7.0)])
    recompute_statistics(layer, batches, steps=3)
    assert statistics(layer) == [2, 1] and next(batches).asnumpy() == 7
    with pytest.raises(ValueError, match="finite"):
        recompute_statistics(layer, [nd.array([[np.nan]])])


def test_an_earlier_call_that_is_still_queued_does_not_count():
    layer = ready(SyncBatchNorm(in_channels=1))
    batches, ones = [nd.array([[1.0], [3.0]])], nd.ones((2000, 2000))
    mx.nd.waitall()
    layer(nd.dot(ones, ones)[:, :1])  # takes some 0.1 s
    recompute_statistics(layer, batches)
    assert statistics(layer) == [2, 1]


def test_several_inputs_and_another_batch_axis():
    net = Net(function=lambda F, x, y: net.norm(x + y))
    net.norm = SyncBatchNorm(in_channels=1, axis=0)
    ready(make_parallel(net, cpus(2), batch_axis=1))
    x, y = np.array([[1.0, 2, 3]]), np.array([[0.0, 0, 3]])
    recompute_statistics(net, [(x.astype("float32"), y.astype("float32"))])
    assert statistics(net) == [3, np.float32(14 / 3)]


def net_of_one(contexts, parallel):
    net = SyncBatchNorm(in_channels=1)  # must not get labels as its second argument
    return ready(make_parallel(net, contexts) if parallel else net, ctx=contexts)


@pytest.mark.parametrize("mode", ["imperative", "static_shape"])
@pytest.mark.parametrize("count, parallel", [(1, False), (1, True), (2, True)])
def test_calls_by_others_do_not_count(count, parallel, mode):
    """Predictions during the call, also in another thread, use former statistics."""
    net = set_mode(net_of_one(cpus(count), parallel), mode)
    x, predictions = nd.array([[1000.0], [1000.0]]), []

    def predict():
        predictions.append(net(x).asnumpy())

    def batches():
        for batch in [[0.0], [2.0]], [[10.0], [12.0]]:
            predict()
            if parallel:
                thread = threading.Thread(target=in_threads(predict))
                thread.start()
            yield nd.array(batch)
            if parallel:
                thread.join()

    recompute_statistics(net, batches())
    assert [statistics(net, k) for k in range(count)] == [[6, 26]] * count
    expected = np.full((2, 1), 1000 / np.sqrt(1 + 1e-5))
    for prediction in predictions:
        assert_near(prediction, expected, scale=1000)


X8, LABELS = np.arange(8, dtype="float32").reshape(8, 1), np.zeros(8, "float32")
LOADERS = {
    "NumPy": lambda: [X8[:5], X8[5:]],
    "another context": lambda: [nd.array(X8, ctx=mx.cpu(3))],
    "(x, label)": lambda: DataLoader(ArrayDataset(X8, LABELS), 3),
    "(x, label, weight)": lambda: [(X8, LABELS, LABELS)],
    "NDArrayIter": lambda: mx.io.NDArrayIter(X8, LABELS, 3),
}


NDARRAY_ITER = pytest.param("NDArrayIter", marks=gluon_1_only("blocks take mx.np"))


@pytest.mark.parametrize("count, parallel", [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("kind", [*list(LOADERS)[:-1], NDARRAY_ITER])
def test_batches_of_every_kind(kind, count, parallel):
    net = net_of_one(cpus(count), parallel)
    recompute_statistics(net, LOADERS[kind]())
    assert statistics(net) == [3.5, 5.25]


def test_a_layer_that_no_batch_reaches():
    net = nn.Dense(1, in_units=1)
    layer = nn.BatchNorm(in_channels=1)  # Gluon 2 keeps only a weak reference
    net.register_child(layer)
    net.initialize()
    with pytest.raises(ValueError, match="BatchNorm"):
        recompute_statistics(net, [nd.array(X8)])
