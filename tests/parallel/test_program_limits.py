"""Limits of programs on several devices: what is refused, and how rows are found.

A result has to have rows; a graph, no variables but arguments and parameters.
"""

from gluon_syncbn import make_parallel

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.blocks import by_gluon, gluon_1_only, prefixed
from support.helpers import cpus, value
from support.nd import nd
from support.nets import (
    Net,
    Normalized,
    X,
    array,
    assert_same,
    backward,
    column,
    dense,
    one_weight,
    started,
    state_of,
    weight_gradient,
)


class Kept(gluon.HybridBlock):
    """A penalty that is kept in an attribute."""

    def __init__(self):
        super().__init__()
        self.dense = dense()

    def hybrid_forward(self, F, x):
        h = self.dense(x)
        self.penalty = (h**2).sum()
        return h


class Reads(gluon.Block):
    """An attribute that has a gradient, or depends on an array with one."""

    def __init__(self, given):
        super().__init__()
        self.dense, self.given = dense(), given

    def forward(self, x):
        given = self.given
        if isinstance(given, list):
            given = given[0].data(x.context)
        return self.dense(x) * given.as_in_context(x.context)


def loss_of_an_attribute(net, x):
    net(x)
    return net.penalty


def loss_with_an_attribute(net, x):
    return net(x).sum() + net.penalty.as_in_context(mx.cpu())


@gluon_1_only("hybrid_forward")
@pytest.mark.parametrize("loss", [loss_of_an_attribute, loss_with_an_attribute])
def test_loss_that_reads_what_a_device_has_kept(loss):
    net = started(Kept(), cpus(2))
    with autograd.record():
        total = loss(net, array(X))
    with pytest.raises(ValueError, match=net.name):
        total.backward()


@gluon_1_only("hybrid_forward")
def test_penalty_of_the_one_device_that_has_rows():
    """The penalty is computed from the whole batch."""
    results = []
    for contexts in cpus(2), None:
        net = started(Kept(), contexts)
        backward(lambda net=net: loss_with_an_attribute(net, array(X[:1])))
        results.append(state_of(net))
    assert_same(*results)


@gluon_1_only("Block.params")
@pytest.mark.parametrize("way", ["variable", "recorded", "parameter"])
def test_net_that_reads_a_variable_that_is_no_argument(way):
    delta = array([[1.0, 1]])
    if way == "parameter":
        parameter = gluon.Parameter("delta", shape=(1, 2), dtype="float64")
        parameter.initialize(ctx=cpus(2))
        delta = [parameter]
    else:
        delta.attach_grad()
    net = started(Reads(delta), cpus(2))
    words = rf"'given' .*{net.name}"
    with pytest.raises(ValueError, match=words), autograd.record():
        if way == "recorded":
            net.given = delta * 2
        net(array(X))


def mean(F, h):
    return h.mean()


def similarities(F, h):
    return F.dot(h, h, transpose_b=True)


def rows_last(F, h):
    return F.transpose(F.expand_dims(h, axis=0), axes=(2, 1, 0))


@pytest.mark.parametrize("rows", [2, 4, 5])
@pytest.mark.parametrize("function", [mean, similarities, rows_last])
def test_result_whose_length_is_that_of_the_rows_by_chance(function, rows):
    net = started(Net(dense(), function=function), cpus(2))
    with pytest.raises(ValueError, match=r"shape|\*, \d"):
        with autograd.record():
            net(array(X[:rows]))


@pytest.mark.parametrize("train", [True, False])
def test_the_look_for_rows_changes_nothing(train):
    """It is one more call, on one device, of the first batch that is even."""
    results = []
    for contexts in cpus(2), cpus(1):
        net = started(Normalized(), contexts, "hybridize")
        with autograd.record(train_mode=train):
            y = net(array(X[:4]))
        results.append([y.asnumpy(), *map(value, net.collect_params().values())])
    assert_same(*results)


def test_a_net_that_accepts_one_number_of_rows():
    """So does GluonCV's R-CNN; the look fails, and the call does not."""
    net = started(Net(dense(), function=lambda F, h: h.reshape((3, 2)) * 1), cpus(2))
    assert net(array(X)).shape == (6, 2)


@gluon_1_only("hybrid_forward")
def test_the_look_for_rows_is_before_the_call():
    """A net keeps the rows of its last call, which ran on the second device."""
    net = started(Kept(), cpus(2))
    net(array(X[:4]))
    h = net.dense(array(X[2:4]))
    assert_same([net.penalty.asnumpy()], [(h**2).sum().asnumpy()])


@pytest.mark.parametrize("mode", ["imperative", "static_shape"])
def test_the_look_for_rows_draws_no_random_numbers(mode):
    net = started(Net(dense(), nn.Dropout(0.5)), cpus(2), mode)
    masks = []
    for _ in range(2):  # the second call does not look
        mx.random.seed(5)
        with autograd.train_mode():
            masks.append(net(array(X)).asnumpy())
    assert (masks[0] == 0).any() and (masks[0] == masks[1]).all()


def test_a_loop_over_shards_is_refused():
    net = started(Normalized(), cpus(2))
    shards = gluon.utils.split_and_load(array(X), cpus(2))
    with pytest.raises(ValueError, match=r"cpu\(1\).*batch"):
        with autograd.record():
            [net(x) for x in shards]
    for x in shards:  # predictions of each are right
        assert net(x).shape == (3, 2)


# ---- Other contexts, and gradients and outputs of another form.


def test_net_on_other_contexts(devices):
    net = nn.Dense(1, **prefixed("mine_"))
    net.initialize(ctx=mx.cpu(3))
    expected = r"'.* cpu\(0\), cpu\(1\).* cpu\(3\)"
    expected = by_gluon("'mine_weight", "'weight") + expected
    with pytest.raises(ValueError, match=expected):
        make_parallel(net, devices.contexts)
    assert "forward" not in vars(net)


def test_net_called_by_one_that_is_parallel_over_others(devices, make_devices):
    inner, x = one_weight(make_devices(1, first=1).contexts, 2.0), column(1, 2)
    outer = nn.Sequential()
    outer.add(nn.Lambda(lambda x: inner(x)))
    make_parallel(outer, devices.contexts)
    with pytest.raises(ValueError, match="parallel"):
        with autograd.record():
            outer(x)
    assert (outer(x).asnumpy()[:, 0] == [2, 4]).all()  # nothing is recorded


@pytest.mark.parametrize("rows, dtype", [(3, "float32"), (2, "float64")])
def test_head_gradient_of_another_form(rows, dtype, devices):
    net, x = one_weight(devices.contexts), column(1, 2)
    with autograd.record():
        y = net(x)
    words = rf"head 0.*\(2, 1\).*float32.*\({rows}, 1\).*{dtype}"
    gradient = nd.ones((rows, 1), dtype=dtype)
    with pytest.raises(ValueError, match=words):
        y.backward(gradient)
    with pytest.raises(ValueError, match=words.replace("head 0", "head 1")):
        autograd.backward([y, y], [None, gradient])
    y.backward(nd.ones((2, 1)))
    assert weight_gradient(net) == 3


@pytest.mark.parametrize(
    "outputs, words",
    [
        (lambda x: [x.mean()] * 2, r"2 rows.*\(1?,?\).*cpu\(0\)"),
        (lambda x: ([x], [x, x]), r"float32 \(\*, 1\).*cpu\(1\)"),
        (lambda x: ({"a": x, "b": x}, {"b": x, "a": x}), r"\['b', 'a'\]|cpu\(1\)"),
        (lambda x: (x, x.tile((1, 2))), r"\(\*, 1\).*\(\*, 2\)"),
        (lambda x: (x, x.astype("float64")), r"float32.* float64"),
    ],
)
def test_outputs_that_cannot_be_joined(outputs, words, devices):
    net = nn.Lambda(lambda x: outputs(x)[x.context.device_id])
    net, x = make_parallel(net, devices.contexts), column(1, 2, 3)
    with pytest.raises(ValueError, match=words), autograd.record():
        net(x)
