"""make_parallel returns the net itself: parts, files, copies, parents, undoing it."""

import copy
import pickle

from gluon_syncbn import (
    SyncBatchNorm,
    check_replicas,
    make_parallel,
    revert_parallel,
    revert_sync_batchnorm,
)
from gluon_syncbn.compat import IS_GLUON_2
from gluon_syncbn.layer.finding import synchronized_layers
from gluon_syncbn.mxnet_private.parameters import contexts_of

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import Block, SymbolBlock, Trainer, loss, nn
from support.blocks import (
    Double,
    Function,
    by_gluon,
    gluon_1_only,
    move,
    prefixed,
    sharing,
)
from support.helpers import (
    MODES,
    cpus,
    differentiate,
    imported,
    set_mode,
    values,
    write_from_within,
)
from support.nd import nd
from support.parallel_nets import (
    SHAPE,
    assert_same,
    column,
    dense,
    pair,
    train,
    weight_gradient,
)


def test_a_parallel_net_is_the_net_itself(devices):
    net = nn.HybridSequential()
    net.features, net.output = nn.Dense(3), nn.Dense(2)
    net.add(nn.BatchNorm())
    names, shape = list(net.collect_params()), (3, 2)
    assert make_parallel(net, devices.contexts) is net
    assert type(net) is nn.HybridSequential and type(net[2]) is SyncBatchNorm
    assert list(net.collect_params()) == names and net[0] is net.features
    assert net.devices.contexts == devices.contexts
    net.initialize()
    assert net(nd.ones(shape)).shape == shape
    net.output = nn.Dense(5)  # the next task has other classes
    net.output.initialize(ctx=mx.cpu(0))
    with pytest.raises(ValueError, match=r"cpu\(0\), cpu\(1\).* cpu\(0\)\."):
        net(nd.ones(shape))


@gluon_1_only("SymbolBlock")
@pytest.mark.parametrize("is_graph", [False, True])
def test_layers_that_were_reverted_are_converted_by_the_next_training_call(is_graph):
    net = nn.HybridSequential()
    net.add(nn.Dense(3, in_units=2), nn.BatchNorm(in_channels=3))
    if is_graph:
        x = mx.sym.var("x")
        net = SymbolBlock(net(x), x, net.collect_params())
    make_parallel(net, cpus(2)).initialize()
    assert synchronized_layers(revert_sync_batchnorm(net)) == []
    with autograd.record():
        net(nd.ones((4, 2)))
    assert len(synchronized_layers(net)) == 1


@gluon_1_only("its nets hold weak references, which are not copied")
@pytest.mark.parametrize("copied", [copy.deepcopy, "pickle"])
@pytest.mark.parametrize("mode", MODES)
def test_copies_are_parallel_nets_of_their_own(mode, copied):
    plain, net = pair(cpus(2))
    net(nd.ones((3, *SHAPE), dtype="float64"))
    if copied == "pickle":
        twin = pickle.loads(pickle.dumps(net))
    else:
        twin = copied(net)
    assert twin.forward.net is twin and twin.devices is not net.devices
    for each in net, twin:
        set_mode(each, mode)
    # Gluon's copies have no gradients, and all arrays are on one context.
    move(twin, twin.devices.contexts)
    before = values(twin)
    train(net, [3, 1])
    assert_same(values(twin), before)
    assert_same(train(twin, [5, 2, 1]), train(plain, [5, 2, 1]))


@pytest.mark.parametrize("parent_is", ["parallel", "plain"])
@pytest.mark.parametrize("mode", MODES)
def test_in_a_parent(parent_is, mode):
    """A parent that is parallel over the same devices calls it with shards."""
    results = []
    for child in pair(cpus(2)):
        parent = nn.HybridSequential()
        parent.add(child, Double())
        if parent_is == "parallel" and results:
            make_parallel(parent, cpus(2))
        set_mode(parent if parent_is == "parallel" else child, mode)
        results.append(train(parent, [5, 2, 1]))
    assert_same(*results)


@gluon_1_only("a trace does not know whether it is for training")
def test_a_hybridized_parent_predicts_on_one_device_and_refuses_to_train():
    plain, net = pair(cpus(2))
    x = nd.ones((3, *SHAPE), dtype="float64")
    right = (2 * plain(x)).asnumpy()
    parent = nn.HybridSequential(**prefixed("outer_"))
    parent.add(net, Double())
    parent.hybridize()
    with pytest.raises(RuntimeError, match="outer.*hybridize"):
        with autograd.record():
            parent(x)
    assert_same([parent(x).asnumpy()], [right])


class OwnDense(Function):
    """Gluon traces it for the shape of its weight in the first call."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.weight = self.params.get("w", shape=(1, 0), allow_deferred_init=True)

    def compute(self, F, x, weight):
        return F.FullyConnected(self.net(x), weight, num_hidden=1, no_bias=True)


@gluon_1_only("shapes are not inferred by traces")
def test_a_parent_that_is_traced_for_shapes_alone(devices):
    parent = OwnDense(dense(devices.contexts, 3.0))
    parent.weight.initialize(mx.init.Constant(2))
    with autograd.record():
        y = parent(column(1, 2))
    assert (y.asnumpy()[:, 0] == [6, 12]).all()


def test_nets_that_share_parameters(devices):
    net = dense(devices.contexts)
    other = sharing(net, nn.Dense, units=1, use_bias=False, in_units=1)
    make_parallel(other, devices.contexts)
    differentiate(lambda x: net(x) + 10 * other(x[:1]), column(1, 2))
    assert weight_gradient(net) == 3 + 2 * 10  # the sum is over rows
    revert_parallel(net)
    assert other(column(1, 2)).shape == (2, 1)
    with pytest.raises(ValueError, match=r"cpu\(2\).* cpu\(0\)"):
        make_parallel(net, cpus(2, first=2))


def test_hooks_see_whole_batches(devices):
    net, seen = dense(devices.contexts), []
    net.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    net.register_forward_hook(lambda _, inputs, y: seen.append(y.shape))
    net(column(1, 2, 3))
    assert seen == [(3, 1), (3, 1)]


def test_gluons_estimator(devices):
    from mxnet.gluon.contrib.estimator import Estimator

    metric = mx.gluon.metric if IS_GLUON_2 else mx.metric
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, *SHAPE)), rng.integers(0, 3, 12)
    arrays = mx.gluon.data.ArrayDataset(x, y)
    nets = pair(devices.contexts)
    for net in nets:
        net(nd.array(x[:5], dtype="float64"))
        trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
        options = {"trainer": trainer, by_gluon("context", "device"): mx.cpu(0)}
        criterion = loss.SoftmaxCrossEntropyLoss()
        estimator = Estimator(net, criterion, metric.Loss(), **options)
        estimator.fit(mx.gluon.data.DataLoader(arrays, 5), epochs=2)
    assert_same(*map(values, nets))


# ---- undoing it ----------------------------------------------------------------------


class Twice(nn.Dense):
    """Its `forward` was replaced before."""

    def __init__(self):
        super().__init__(1, use_bias=False, in_units=1)
        self.forward = self.twice

    def twice(self, x):
        return 2 * nn.Dense.forward(self, x)


def test_undone_it_is_what_it_was(devices):
    net = Twice()
    before = dict(vars(net))
    make_parallel(net, devices.contexts).initialize(mx.init.One())
    assert (net(column(1, 2)).asnumpy()[:, 0] == [2, 4]).all()
    assert copy.deepcopy(net)(column(3)).asnumpy() == 6
    assert revert_parallel(net) is net
    assert vars(net).keys() == before.keys() and net.forward == before["forward"]
    assert "_reduce" not in vars(net.weight)
    x = column(1, 2).as_in_context(mx.cpu(1))
    assert net(x).context == mx.cpu(1)
    make_parallel(net, devices.contexts)
    assert net(x).context == mx.cpu(0)


# ---- files ---------------------------------------------------------------------------


class TwoInputs(Function):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Dense(99), nn.BatchNorm()

    def compute(self, F, x, others, unused=None):
        return self.norm(self.dense(x)) + others[0]


class Parent(Block):
    def __init__(self, child):
        super().__init__()
        self.child = child


@pytest.mark.filterwarnings("ignore:.*only this process can run")
def test_files_have_the_bits_of_the_first_device(tmp_path):
    net, other = (make_parallel(TwoInputs(), cpus(3)) for _ in range(2))
    net.initialize(mx.init.Uniform(1))
    net.hybridize()
    x, others = nd.random.normal(shape=(5, 3)), nd.random.normal(shape=(5, 99))
    y = net(x, [others], None)
    # Gluon would save the mean, which may differ from three equal numbers.
    weight = net.dense.weight
    mean = type(weight)._reduce(weight)
    assert (mean != weight.data(mx.cpu(0))).asnumpy().any()
    net.export(str(tmp_path / "net"), 7)
    exported = imported(tmp_path / "net", "data0", "data1", epoch=7)
    for name, parameter in net.collect_params().items():
        saved = exported.params.get(name).data()
        assert (saved == parameter.data(mx.cpu(0))).asnumpy().all()
    net.save_parameters(str(tmp_path / "net.params"))
    other.load_parameters(str(tmp_path / "net.params"))
    assert (other(x, [others], None) == y).asnumpy().all()
    Parent(net).save_parameters(str(tmp_path / "parent.params"))
    saved = mx.nd.load(str(tmp_path / "parent.params"))["child.dense.weight"]
    assert (saved == weight.data(mx.cpu(0))).asnumpy().all()


def test_files_go_to_the_devices(tmp_path, devices):
    net = dense(devices.contexts, 3.0)
    net.save_parameters(str(tmp_path / "a"))
    for contexts in None, mx.cpu(1), devices.contexts:
        other = make_parallel(nn.Dense(1, use_bias=False), devices.contexts)
        other.load_parameters(str(tmp_path / "a"), contexts)
        if contexts != mx.cpu(1):
            assert contexts_of(other.weight) == devices.contexts
            check_replicas(other)
            assert other(column(2)).asnumpy() == 6
        else:
            with pytest.raises(ValueError, match=r"cpu\(0\), cpu\(1\).* cpu\(1\)\."):
                other(column(2))


def test_summary_is_that_of_one_device(devices, capsys):
    plain, net = TwoInputs(), make_parallel(TwoInputs(), devices.contexts)
    x, other = np.ones((5, 3), "f4"), np.ones((5, 99), "f4")
    texts = []
    for block, array in (plain, nd.array), (net, np.asarray):
        block.initialize()
        block.summary(array(x), [array(other)])
        texts.append(capsys.readouterr().out.replace("SyncBatchNorm", "BatchNorm"))
    assert "Total params: 792" in texts[0]
    assert texts[1].split() == texts[0].split()


def saved(net, folder):
    make_parallel(net, cpus(2)).save_parameters(str(folder / "net.params"))
    net.load_parameters(str(folder / "net.params"))


@pytest.mark.parametrize(
    "read",
    [
        saved,
        lambda net, _: make_parallel(net, cpus(2, first=2), reset_ctx=True),
    ],
)
def test_values_are_read_when_no_work_may_change_them(read, tmp_path):
    net = nn.BatchNorm(in_channels=1)
    net.initialize(ctx=cpus(2))
    for mean in net.running_mean.list_data():
        write_from_within(mean)
    read(net, tmp_path)
    for mean in net.running_mean.list_data():
        assert mean.asnumpy() == 2


def test_a_second_call_with_the_same_devices_changes_nothing(devices):
    net = make_parallel(nn.Dense(1, in_units=1), devices.contexts)
    forward = net.forward
    assert make_parallel(net, devices.contexts) is net and net.forward is forward
