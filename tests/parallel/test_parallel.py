"""A net of make_parallel computes what the same net does on one device."""

import collections
import copy

from gluon_syncbn import (
    ParallelCriterion,
    allow_plain_loop,
    check_replicas,
    make_parallel,
)

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, loss, nn
from support.helpers import (
    MODES,
    cpus,
    imported,
    summed_grad,
    values,
)
from support.parallel_nets import (
    SHAPE,
    assert_same,
    batches,
    gradients,
    pair,
    parameters,
    small_net,
    train,
)  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_every_batch_size_trains_and_predicts_like_one_device(mode):
    plain, parallel = pair(cpus(3), mode=mode)
    rows = [4, 1, 9, 2, 3]
    assert_same(train(parallel, rows), train(plain, rows))
    assert_same(values(parallel), values(plain))
    check_replicas(parallel)
    ((x, _),) = batches([2])
    y = parallel(x)
    assert y.context == mx.cpu(0)
    assert_same([y.asnumpy()], [plain(x).asnumpy()])


def test_attributes_and_items_are_those_of_the_template(devices):
    template = nn.HybridSequential()
    with template.name_scope():
        template.features, template.output = nn.Dense(3), nn.Dense(2)
        template.add(template.features, nn.BatchNorm(), template.output)
    net = make_parallel(template, devices.contexts)
    net.initialize()
    assert net.features is template.features and net(mx.nd.ones((3, 2))).shape == (3, 2)
    assert net[0] is net.features and list(net) == [*template]
    twin = copy.deepcopy(net)
    assert twin.features is not template.features and twin.devices is not net.devices
    assert (twin(mx.nd.ones((3, 2))) == net(mx.nd.ones((3, 2)))).asnumpy().all()
    with template.name_scope():
        net.output = nn.Dense(5)
    assert template.output is net.output
    net.remark = "of the parallel net"
    assert not hasattr(template, "remark")


def test_a_copy_of_a_net_in_a_plain_loop_has_parameters_of_its_own():
    net = allow_plain_loop(nn.Dense(1, in_units=2))
    twin = copy.deepcopy(net)
    net.initialize(mx.init.One())
    twin.initialize(mx.init.Zero())
    x = mx.nd.ones((1, 2))
    assert net(x).asnumpy() == 2 and twin(x).asnumpy() == 0


@pytest.mark.parametrize("state", ["called", "deferred", "in part"])
def test_a_net_that_is_initialized_elsewhere_is_moved(state, devices):
    template, x = small_net(), mx.nd.ones((3, *SHAPE))
    part = template[0] if state == "in part" else template
    part.initialize(mx.init.Xavier(), ctx=mx.cpu(3))
    if state == "called":
        template(x.as_in_context(mx.cpu(3)))
        before = template[0].weight.data().asnumpy()
    net = make_parallel(template, devices.contexts, reset_ctx=True)
    if state == "called":
        np.testing.assert_array_equal(template[0].weight.data().asnumpy(), before)
    elif state == "in part":
        net.initialize()
    assert net(x).shape == (3, 3)
    for parameter in parameters(net):
        assert parameter.list_ctx() == devices.contexts


# ---- structures ---------------------------------------------------------------------


class Nested(Block):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(2, flatten=False)

    def forward(self, inputs, others, factor, mask=None):
        outputs = collections.defaultdict(list)  # keeps its kind
        outputs["out"], outputs["mask"] = inputs["x"] * factor, mask
        outputs["list"] = [self.dense(others[0]), (others[1].argmax(axis=1),)]
        return outputs


def test_nested_inputs_and_outputs(devices):
    net = make_parallel(Nested(), devices.contexts)
    net.initialize(mx.init.One())
    x, others = np.arange(3, dtype="float32"), mx.nd.arange(6).reshape((3, 2))
    outputs = net({"x": x}, [others, 2 * others], 2.0)
    assert list(outputs) == ["out", "mask", "list"] and outputs["mask"] is None
    assert (outputs["out"].asnumpy() == [0, 2, 4]).all() and outputs["other"] == []
    sums, (classes,) = outputs["list"]
    assert (sums.asnumpy() == [[1, 1], [5, 5], [9, 9]]).all()
    assert (classes.asnumpy() == [1, 1, 1]).all()


def test_numpy_semantics(devices):
    class Net(nn.Dense):
        def forward(self, x):
            return super().forward(x), x[:, :0]

    with mx.util.np_shape(True), mx.util.np_array(True):
        net = make_parallel(Net(1, use_bias=False), devices.contexts)
        net.initialize(mx.init.One())
        x = mx.np.array([[1.0], [2.0], [3.0]])
        x.attach_grad()
        with autograd.record():
            y, empty = net(x)
            total = (y**2).sum() + empty.sum()
        total.backward()
        assert type(y) is type(x) and empty.shape == (3, 0)
        assert (x.grad.asnumpy()[:, 0] == [2, 4, 6]).all()
        assert summed_grad(net.net.weight) == 28


# ---- not gathered -------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5])
def test_losses_where_the_outputs_are(rows):
    """Two criteria of one output, and gradients of labels, too."""
    plain, parallel = pair(cpus(3), gather=False)
    ((x, _),) = batches([rows])
    label = mx.nd.random.normal(shape=(rows, 3), dtype="float64")
    results = {}
    for net in plain, parallel:
        criteria = [loss.L2Loss(), loss.L1Loss()]
        if net is parallel:
            criteria = [ParallelCriterion(criterion, net) for criterion in criteria]
        x.attach_grad()
        label.attach_grad()
        with autograd.record():
            outputs = net(x)
            first, second = (criterion(outputs, label) for criterion in criteria)
            total = first + 3 * second
        total.backward()
        arrays = total, x.grad, label.grad
        results[net] = [*(array.asnumpy() for array in arrays), *gradients(net)]
    assert [y.context for y in outputs] == cpus(min(rows, 3))
    assert_same(results[parallel], results[plain])


# ---- saving -------------------------------------------------------------------------


class TwoInputs(HybridBlock):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Dense(99), nn.BatchNorm()

    def hybrid_forward(self, F, x, others, unused=None):
        return self.norm(self.dense(x)) + others[0]


def test_files(tmp_path):
    """The exported ones have the bits of the first device."""
    net, other = (make_parallel(TwoInputs(), cpus(3)) for _ in range(2))
    net.initialize(mx.init.Uniform(1))
    net.hybridize()
    x, others = mx.nd.random.normal(shape=(5, 3)), mx.nd.random.normal(shape=(5, 99))
    y = net(x, [others], None)
    # Gluon saves the mean of the replicas, which may differ from three equal numbers.
    weight = net.net.dense.weight
    assert (weight._reduce() != weight.data(mx.cpu(0))).asnumpy().any()
    net.export(tmp_path / "net", 7)
    exported = imported(tmp_path / "net", "data0", "data1", epoch=7)
    for name, parameter in net.collect_params().items():
        saved = exported.params.get(name).data()
        assert (saved == parameter.data(mx.cpu(0))).asnumpy().all()
    net.save_parameters(tmp_path / "net.params")
    other.load_parameters(tmp_path / "net.params")
    assert (other(x, [others], None) == y).asnumpy().all()


def test_summary_is_that_of_the_template(devices, capsys):
    plain, template = TwoInputs(), TwoInputs()
    net = make_parallel(template, devices.contexts)
    x, other = np.ones((5, 3), "f4"), np.ones((5, 99), "f4")
    texts = []
    for block, array in (plain, mx.nd.array), (net, np.asarray):
        block.initialize()
        block.summary(array(x), [array(other)])
        texts.append(capsys.readouterr().out.replace("SyncBatchNorm", "BatchNorm"))
    assert "Total params: 792" in texts[0]
    assert texts[1].split() == texts[0].split()
