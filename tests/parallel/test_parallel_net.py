"""Nets of make_parallel, with their children, files, copies and parents."""

import copy
import gc
import pickle
import sys
from pathlib import Path

import gluon_syncbn
from gluon_syncbn import (
    SyncBatchNorm,
    check_replicas,
    make_parallel,
    revert_parallel,
    revert_sync_batchnorm,
)
from gluon_syncbn.layer.finding import synchronized_layers
from gluon_syncbn.mxnet_private.parameters import contexts_of

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import SymbolBlock, nn
from support.blocks import (
    Double,
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
    queue_hidden_write,
    ready,
    set_mode,
)
from support.nd import nd
from support.nets import (
    Net,
    Normalized,
    X,
    array,
    assert_same,
    column,
    dense,
    one_weight,
    started,
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


@gluon_1_only("blocks of Gluon 2 take no symbols")
def test_layers_that_were_reverted_are_converted_by_the_next_training_call():
    net, x = nn.HybridSequential(), mx.sym.var("x")
    net.add(nn.Dense(3, in_units=2), nn.BatchNorm(in_channels=3))
    net = SymbolBlock(net(x), x, net.collect_params())
    make_parallel(net, cpus(2)).initialize()
    assert synchronized_layers(revert_sync_batchnorm(net)) == []
    with autograd.record():
        net(nd.ones((4, 2)))
    assert len(synchronized_layers(net)) == 1


@gluon_1_only("nets of Gluon 2 hold weak references, which are not copied")
def test_a_pickled_net_is_a_parallel_net_of_its_own():
    plain, net = started(Normalized(), None), started(Normalized(), cpus(2))
    net(array(X))
    twin = pickle.loads(pickle.dumps(net))
    assert twin.forward.net is twin and twin.devices is not net.devices
    for each in net, twin:
        set_mode(each, "hybridize")
    # Gluon's copies have no gradients, and all arrays are on one context.
    move(twin, twin.devices.contexts)
    train(net, [3, 1])  # does not change the twin
    assert_same(train(twin), train(plain))


@pytest.mark.parametrize("parent_is", ["parallel", "plain"])
@pytest.mark.parametrize("mode", MODES)
def test_in_a_parent(parent_is, mode):
    """A parallel parent passes shards to the child, a plain parent whole batches."""
    results = []
    for contexts in cpus(2), None:
        child, parent = started(Normalized(), contexts), nn.HybridSequential()
        parent.add(child, Double())
        if parent_is == "parallel" and contexts:
            make_parallel(parent, contexts)
        set_mode(parent if parent_is == "parallel" else child, mode)
        results.append(train(parent))
    assert_same(*results)


@gluon_1_only("traces of Gluon 2 do not show whether they are for training")
def test_a_hybridized_parent_predicts_on_one_device_and_refuses_to_train():
    """The parent is traced before make_parallel, and again by the first prediction."""
    plain, net = (started(Net(dense()), None) for _ in range(2))
    parent, right = nn.HybridSequential(**prefixed("outer_")), 2 * plain(array(X))
    parent.add(net, Double())
    parent.hybridize()
    parent(array(X))
    make_parallel(net, cpus(2), reset_ctx=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="outer.*hybridize"):
            with autograd.record():
                parent(array(X))
        assert_same([parent(array(X)).asnumpy()], [right.asnumpy()])
    make_parallel(parent, cpus(2))
    plain_parent = nn.Sequential()
    plain_parent.add(plain, Double())
    assert_same(train(parent), train(plain_parent))


@gluon_1_only("parameters of Gluon 2 have no unique names")
def test_another_net_with_the_same_parameter_names_keeps_its_graph(devices):
    """Gluon counts names per thread, so nets of two threads can have the same names."""
    one, other = (nn.Dense(2, in_units=2, prefix="same_") for _ in range(2))
    other.initialize()
    other.hybridize()
    other(array(X)[:, :2].astype("float32"))
    graph = other._cached_op
    make_parallel(one, devices.contexts)
    assert other._cached_op is graph


@pytest.mark.parametrize("state", ["deferred", "in part"])
def test_a_net_that_is_initialized_elsewhere_is_moved(state, devices, tmp_path):
    net, x = nn.HybridSequential(), nd.ones((3, 2))
    net.add(nn.Dense(4), nn.BatchNorm(), nn.Dense(3))
    part = net[0] if state == "in part" else net
    part.initialize(mx.init.Xavier(), ctx=mx.cpu(3))
    make_parallel(net, devices.contexts, reset_ctx=True)
    if state == "in part":
        net.initialize()
    assert net(x).shape == (3, 3)
    for parameter in net.collect_params().values():
        assert contexts_of(parameter) == devices.contexts
    net.save_parameters(f"{tmp_path}/net.params")
    for read in (
        lambda **options: net.initialize(force_reinit=True, **options),
        lambda **options: net.load_parameters(f"{tmp_path}/net.params", **options),
    ):
        read(ctx=mx.cpu(3))
        with pytest.raises(ValueError, match=r"got cpu\(3\)"):
            net(x)


def test_nets_that_share_parameters(devices):
    net = one_weight(devices.contexts)
    other = sharing(net, nn.Dense, units=1, use_bias=False, in_units=1)
    make_parallel(other, devices.contexts)
    differentiate(lambda x: net(x) + 10 * other(x[:1]), column(1, 2))
    assert weight_gradient(net) == 3 + 2 * 10  # 10 * other(x[:1]) is added to both rows
    revert_parallel(net)
    assert other(column(1, 2)).shape == (2, 1)
    with pytest.raises(ValueError, match=r"cpu\(2\).* cpu\(0\)"):
        make_parallel(net, cpus(2, first=2))


def test_devices_without_a_row_get_statistics_although_a_later_layer_fails():
    norms, divisors = [nn.BatchNorm(in_channels=1) for _ in range(2)], [0, 1]
    net = nn.Sequential()
    net.add(norms[0], nn.Lambda(lambda x: x / divisors[-1]), norms[1])
    net = ready(make_parallel(net, cpus(3), nonfinite="raise"))
    x = nd.array([[1.0], [5.0]])
    with autograd.train_mode():
        net(x).wait_to_read()
        divisors.pop()
        with pytest.raises(mx.MXNetError, match="not finite"):
            net(x).wait_to_read()
    gluon_syncbn.recover()
    means = [
        [mean.asnumpy().item() for mean in n.running_mean.list_data()] for n in norms
    ]
    assert means == [pytest.approx([0.57] * 3), pytest.approx([0] * 3, abs=1e-6)]


def count_functions(devices, call):
    """Count the calls of our functions in this thread and the devices' threads."""
    folder, frames = str(Path(gluon_syncbn.__file__).parent), {}

    def note(frame, event, _):
        # Each frame counts once, although a generator's frame has several call events.
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder):
            if not code.co_name.endswith(("comp>", "genexpr>")):
                frames[id(frame)] = frame

    devices.map(lambda: sys.setprofile(note))
    gc.collect()
    gc.disable()
    frames.clear()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    count = len(frames)
    devices.map(lambda: sys.setprofile(None))
    return count


def test_a_step_enters_few_functions():
    """The limits are for three layers and two contexts."""
    net = nn.HybridSequential()
    net.add(nn.Dense(4), nn.BatchNorm(), nn.Dense(1))
    net = ready(make_parallel(net, cpus(2)))
    net.hybridize()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd")
    x, losses = nd.random.normal(shape=(6, 3)), []

    def forward():
        with autograd.record():
            losses.append((net(x) ** 2).mean())

    for _ in range(2):
        forward()
        losses[-1].backward()
        trainer.step(1)
    step = lambda: trainer.step(1)  # noqa: E731
    assert count_functions(net.devices, forward) <= by_gluon(96, 106)
    assert count_functions(net.devices, losses[-1].backward) <= 63
    assert count_functions(net.devices, step) <= 50
    mx.nd.waitall()


def test_a_layer_that_the_first_call_makes(recwarn):
    class Lazy(nn.Sequential):
        def forward(self, x):
            if not len(self):
                self.add(nn.BatchNorm())
                self.initialize(ctx=cpus(2))
            return super().forward(x)

    net = make_parallel(Lazy(), cpus(2))
    for _ in range(2):
        with autograd.record():
            net(nd.ones((4, 3))).wait_to_read()
    (warning,) = [w for w in recwarn if "has made" in str(w.message)]
    assert "batchnorm" in str(warning.message).lower() and warning.filename == __file__
    assert synchronized_layers(net) == [net[0]]


@pytest.mark.parametrize("nonfinite, kept", [("propagate", "skip"), ("raise", "raise")])
def test_a_synchronized_layer_keeps_its_settings(nonfinite, kept, devices):
    options = {"timeout": 7, "group": "machine", "unbiased_running_var": True}
    layer = SyncBatchNorm(1, nonfinite="skip", activation="relu", **options)
    expected = layer._sync.settings._replace(num_devices=2, nonfinite=kept)
    make_parallel(layer, devices.contexts, nonfinite=nonfinite)
    assert layer._sync.settings == expected


def test_a_layer_with_a_forward_of_its_own_is_not_converted(devices):
    layer = nn.BatchNorm(in_channels=3)
    layer.forward = lambda x: 2 * x
    make_parallel(layer, devices.contexts, sync_bn=False)
    with pytest.warns(UserWarning, match="forward"):
        gluon_syncbn.convert_sync_batchnorm(layer)
    assert type(layer) is nn.BatchNorm


# ---- revert_parallel -----------------------------------------------------------------


class Twice(nn.Dense):
    def __init__(self):
        super().__init__(1, use_bias=False, in_units=1)
        self.forward = self.twice

    def twice(self, x):
        return 2 * nn.Dense.forward(self, x)


def test_a_reverted_net_is_what_it_was(devices):
    net = Twice()
    before = dict(vars(net))
    make_parallel(net, devices.contexts).initialize(mx.init.One())
    forward = net.forward
    assert make_parallel(net, devices.contexts) is net and net.forward is forward
    assert (net(column(1, 2)).asnumpy()[:, 0] == [2, 4]).all()
    assert copy.deepcopy(net)(column(3)).asnumpy() == 6
    assert revert_parallel(net) is net
    assert vars(net).keys() == before.keys() and net.forward == before["forward"]
    assert type(net.weight) is mx.gluon.Parameter
    x = column(1, 2).as_in_context(mx.cpu(1))
    assert net(x).context == mx.cpu(1)
    make_parallel(net, devices.contexts)
    assert net(x).context == mx.cpu(0)


# ---- files ---------------------------------------------------------------------------


def two_inputs():
    add = lambda F, h, others, unused=None: h + others[0]  # noqa: E731
    return Net(nn.Dense(99), nn.BatchNorm(), function=add)


@pytest.mark.filterwarnings("ignore:.*only this process can run")
def test_files_have_the_bits_of_the_first_device(tmp_path):
    net, other = (make_parallel(two_inputs(), cpus(3)) for _ in range(2))
    net.initialize(mx.init.Uniform(1))
    net.hybridize()
    x, others = nd.random.normal(shape=(5, 3)), nd.random.normal(shape=(5, 99))
    y = net(x, [others], None)
    # Gluon would save a rounded mean of the three devices' equal weights.
    weight = net.layers[0].weight
    mean = mx.gluon.Parameter._reduce(weight)
    assert (mean != weight.data(mx.cpu(0))).asnumpy().any()
    net.export(str(tmp_path / "net"), 7)
    exported = imported(tmp_path / "net", "data0", "data1", epoch=7)
    for name, parameter in net.collect_params().items():
        saved = exported.params.get(name).data()
        assert (saved == parameter.data(mx.cpu(0))).asnumpy().all()
    net.save_parameters(str(tmp_path / "net.params"))
    other.load_parameters(str(tmp_path / "net.params"))
    assert (other(x, [others], None) == y).asnumpy().all()
    parent = nn.Sequential()
    parent.add(net)
    parent.save_parameters(str(tmp_path / "parent.params"))
    saved = mx.nd.load(str(tmp_path / "parent.params"))["0.layers.0.weight"]
    assert (saved == weight.data(mx.cpu(0))).asnumpy().all()


def test_contexts_of_loaded_parameters(tmp_path, devices):
    net = one_weight(devices.contexts, 3.0)
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


def test_saving_before_the_net_is_initialized_and_after_it_was_moved(tmp_path):
    net = make_parallel(nn.Dense(1, in_units=1), cpus(2))
    with pytest.raises(RuntimeError, match="not been initialized"):
        net.save_parameters(str(tmp_path / "a"))
    net.initialize()
    move(net, cpus(2, first=2))
    net.save_parameters(str(tmp_path / "a"))


def test_summary_is_that_of_one_device(devices, capsys):
    plain, net = two_inputs(), make_parallel(two_inputs(), devices.contexts)
    x, other = np.ones((5, 3), "f4"), np.ones((5, 99), "f4")
    texts = []
    for block, make in (plain, nd.array), (net, np.asarray):
        block.initialize()
        block.summary(make(x), [make(other)])
        texts.append(capsys.readouterr().out.replace("SyncBatchNorm", "BatchNorm"))
    assert "Total params: 792" in texts[0]
    assert texts[1].split() == texts[0].split()


@pytest.mark.parametrize("way", ["saved", "moved"])
def test_saving_and_moving_wait_for_queued_writes(way, tmp_path):
    net, file = nn.BatchNorm(in_channels=1), str(tmp_path / "net.params")
    net.initialize(ctx=cpus(2))
    for mean in net.running_mean.list_data():
        queue_hidden_write(mean)
    if way == "saved":
        make_parallel(net, cpus(2)).save_parameters(file)
        net.load_parameters(file)
    else:
        make_parallel(net, cpus(2, first=2), reset_ctx=True)
    for mean in net.running_mean.list_data():
        assert mean.asnumpy() == 2
