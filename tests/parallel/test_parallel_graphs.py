"""Graphs around a parallel net, structures of its inputs, and errors."""

import collections
import gc
import weakref
from types import SimpleNamespace

import gluon_syncbn
from gluon_syncbn import allow_plain_loop, make_parallel
from gluon_syncbn.mxnet_private.tape import release_owners
from gluon_syncbn.nested import flatten

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.blocks import gluon_1_only, move
from support.helpers import (
    assert_all_near,
    cpus,
    differentiate,
    set_mode,
    summed_grad,
    value,
)
from support.nd import nd
from support.nets import (
    Net,
    X,
    array,
    column,
    dense,
    one_weight,
    started,
    weight_gradient,
)


@gluon_1_only("all parameters of Gluon 2 are dense")
def test_sparse_parameters(devices):
    """One of the parameters is not used."""
    net, other = nn.Sequential(), one_weight(devices.contexts)
    net.add(nn.Embedding(4, 2, sparse_grad=True))
    stypes = {"stype": "row_sparse", "grad_stype": "row_sparse"}
    net.unused = net.params.get("sparse", shape=(3, 2), **stypes)
    make_parallel(net, devices.contexts).initialize()
    with autograd.record():
        total = net(column(1, 3, 1)).sum() + net(column(0)).sum()
        total = total + other(column(1, 2)).sum()
    total.backward()
    assert [grad.stype for grad in net[0].weight.list_grad()] == ["row_sparse"] * 2
    assert (summed_grad(net[0].weight)[:, 0] == [1, 2, 0, 1]).all()
    assert weight_gradient(other) == 3
    gluon_syncbn.check_replicas(net)


def test_autograd_grad_is_refused(devices):
    """Heads that depend on no parallel net are accepted, also with create_graph."""
    net, x = one_weight(devices.contexts), column(1, 2)
    x.attach_grad()
    with autograd.record():
        total, log = net(x).sum(), nd.log(x)
        (first,) = autograd.grad(log, [x], create_graph=True)
    first.backward()
    assert (x.grad == -1 / (x * x)).asnumpy().all()
    with pytest.raises(ValueError, match="attach_grad.*backward"):
        autograd.grad(total, [x])
    total.backward()
    assert weight_gradient(net) == x.sum() and (x.grad == 1).asnumpy().all()


# ---- freeing of graphs ---------------------------------------------------------------


class Token:
    """An argument of a net. Tests count the tokens that exist."""


@pytest.mark.parametrize("way", ["parallel", "from an input", "plain loop"])
def test_graphs_are_freed(way):
    """Python's garbage collector, which may run too late, is not needed."""
    net = Net(dense(), function=lambda F, h, token: (h, h * 2))
    contexts, xs = cpus(2), [array(X)]
    if way == "plain loop":
        move(allow_plain_loop(started(net, None)), contexts)
        xs = gluon.utils.split_and_load(*xs, contexts)
    else:
        started(net, contexts)
    if way == "from an input":
        xs[0].attach_grad()
    tokens, counts = weakref.WeakSet(), []

    def count():
        mx.nd.waitall()
        nd.zeros(1).wait_to_read()  # earlier operators are deleted before this one runs
        release_owners()  # as the next call does
        counts.append(len(tokens))

    gc.disable()
    for _ in range(3):  # only the last graph has a backward
        token = Token()
        tokens.add(token)
        with autograd.record():
            totals = [net(x, token)[0].sum() for x in xs]
        del token
        count()
    autograd.backward(totals)
    count()
    gc.enable()
    assert counts == [1, 1, 1, 0]


def test_ctrl_c_before_mxnet_records_a_call_keeps_no_graph(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    net, x = make_parallel(nn.Lambda(lambda x, token: x * 1), cpus(2)), column(1, 2)
    x.attach_grad()
    token, tokens = Token(), weakref.WeakSet()
    tokens.add(token)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(mx.base._LIB, "MXCustomFunctionRecord", interrupt)
        differentiate(net, x, token)
    del token
    mx.nd.waitall()
    gc.collect()
    release_owners()
    assert not tokens


# ---- Calls, threads and modes that a check or a graph could confuse.


class Twice(gluon.Block):
    """Calls a child in prediction and in training, one call right after the other."""

    def __init__(self, child):
        super().__init__()
        self.child = child

    def forward(self, x):
        with autograd.pause():
            target = self.child(x)
        return self.child(x), target


@pytest.mark.parametrize("calls", ["of a child", "of the net"])
@pytest.mark.parametrize("count", [1, 2])
def test_two_modes_in_a_row(count, calls):
    """MXNet would run pending operators of static_shape in the mode of a later call."""
    results, xs = [], np.random.default_rng(0).normal(3, 1, (10, 64, 400))
    for mode in "static_shape", "imperative":
        net = nn.HybridSequential()
        for units in 400, 2:
            net.add(dense(units, 400), nn.BatchNorm(in_channels=units, momentum=0.5))
        net = set_mode(net, mode) if calls == "of the net" else Twice(net)
        started(net, cpus(count))
        if calls == "of a child":
            set_mode(net.child, mode)
        for p in net.collect_params().values():
            p.set_data(p.data() * (0.01 if len(p.shape) == 2 else 1))
        found = []
        for x in map(array, xs):
            with autograd.train_mode():
                found.append(net(x))
            if calls == "of the net":
                found.append(net(x))
        ys = [y.asnumpy() for y in flatten(found)]
        results.append(ys + [value(p) for p in net.collect_params().values()])
    assert_all_near(*results, count=64 * 400)


# ---- Structures of inputs and outputs.


def test_rows_along_another_axis(devices):
    net = nn.Lambda(lambda x: x * x)
    net, x = make_parallel(net, devices.contexts, batch_axis=1), column(1, 2, 3).T
    x.attach_grad()
    y = differentiate(net, x)
    assert y.asnumpy().tolist() == [[1, 4, 9]]
    assert x.grad.asnumpy().tolist() == [[2, 4, 6]]


def nested(inputs, others, factor, mask=None):
    outputs = collections.defaultdict(list)  # joined outputs are one also
    outputs["out"], outputs["mask"] = inputs["x"] * factor, mask
    outputs["list"] = [others[0].sum(axis=1), (others[1].argmax(axis=1),)]
    return outputs


def test_nested_inputs_and_outputs(devices):
    net = make_parallel(nn.Lambda(nested), devices.contexts)
    x, others = np.arange(3, dtype="float32"), nd.arange(6).reshape((3, 2))
    outputs = net({"x": x}, [others, 2 * others], 2.0)
    assert list(outputs) == ["out", "mask", "list"] and outputs["mask"] is None
    assert (outputs["out"].asnumpy() == [0, 2, 4]).all() and outputs["other"] == []
    sums, (classes,) = outputs["list"]
    assert sums.asnumpy().tolist() == [1, 5, 9]
    assert (classes.asnumpy() == [1, 1, 1]).all()


class Tempered(nn.Dense):
    def forward(self, x, temperature):
        return 7, super().forward(x) * temperature, x[:, :0]


@gluon_1_only("all tests with Gluon 2 use arrays of mx.np")
@pytest.mark.parametrize("is_variable", [True, False])
def test_numpy_semantics(is_variable, devices):
    """One argument has no axes. The results are a number and two arrays, one empty."""
    with mx.util.np_shape(True), mx.util.np_array(True):
        net = make_parallel(Tempered(1, use_bias=False, in_units=1), devices.contexts)
        net.initialize(mx.init.One())
        x, temperature = mx.np.array([[1.0], [2.0], [3.0]]), mx.np.array(3.0)
        x.attach_grad()
        if is_variable:
            temperature.attach_grad()
        with autograd.record():
            _, y, empty = net(x, temperature)
            total = (y**2).sum() + empty.sum()
        total.backward()
        assert type(y) is type(x) and empty.shape == (3, 0)
        assert (x.grad.asnumpy()[:, 0] == [18, 36, 54]).all()
        assert summed_grad(net.weight) == 18 * 14
        assert not is_variable or temperature.grad.asnumpy() == 6 * 14
        differentiate(lambda: net(x, temperature)[2].sum())  # temperature is unused
        assert not is_variable or temperature.grad.asnumpy() == 6 * 14


# ---- Limits.


@pytest.mark.parametrize(
    "loss",
    [
        lambda net, y: net.penalty,
        lambda net, y: y.sum() + net.penalty.as_in_context(mx.cpu()),
    ],
)
def test_loss_that_reads_what_a_device_has_kept(loss):
    def keep(F, h):
        net.penalty = (h**2).sum()
        return h

    net = started(Net(dense(), function=keep), cpus(2))
    with autograd.record():
        total = loss(net, net(array(X)))
    name = next(iter(net.collect_params().values())).name
    with pytest.raises(ValueError, match=name):
        total.backward()


@gluon_1_only("blocks of Gluon 2 have no names")
@pytest.mark.parametrize("way", ["variable", "parameter"])
def test_net_that_reads_a_variable_that_is_no_argument(way):
    delta = array([[1.0, 1]])
    if way == "parameter":
        parameter = gluon.Parameter("delta", shape=(1, 2), dtype="float64")
        parameter.initialize(ctx=cpus(2))
        delta = [parameter]
    else:
        delta.attach_grad()

    def read(F, h):
        given = net.given[0].data(h.context) if way == "parameter" else net.given
        return h * given.as_in_context(h.context)

    net = started(Net(dense(), function=read), cpus(2))
    net.given = delta
    pattern = rf"'given' .*{net.name}"
    with pytest.raises(ValueError, match=pattern), autograd.record():
        net(array(X))


def test_parallel_net_inside_a_net_with_other_contexts(devices, make_devices):
    inner, x = one_weight(make_devices(1, first=1).contexts, 2.0), column(1, 2)
    outer = nn.Sequential()
    outer.add(nn.Lambda(lambda x: inner(x)))
    make_parallel(outer, devices.contexts)
    with pytest.raises(ValueError, match="parallel"):
        with autograd.record():
            outer(x)
    assert (outer(x).asnumpy()[:, 0] == [2, 4]).all()  # nothing is recorded


@pytest.mark.parametrize("rows, dtype", [(3, "float32"), (2, "float64")])
def test_head_gradient_of_another_shape_or_dtype(rows, dtype, devices):
    net, x = one_weight(devices.contexts), column(1, 2)
    with autograd.record():
        y = net(x)
    pattern = rf"head 0.*\(2, 1\).*float32.*\({rows}, 1\).*{dtype}"
    gradient = nd.ones((rows, 1), dtype=dtype)
    with pytest.raises(ValueError, match=pattern):
        y.backward(gradient)
    with pytest.raises(ValueError, match=pattern.replace("head 0", "head 1")):
        autograd.backward([y, y], [None, gradient])
    y.backward(nd.ones((2, 1)))
    assert weight_gradient(net) == 3


@pytest.mark.parametrize(
    "outputs, pattern",
    [
        (lambda x: [x.mean()] * 2, r"must have 2 rows.*\(1?,?\).*cpu\(0\)"),
        (lambda x: [nd.expand_dims(x, 0)] * 2, r"must have 2 rows.*cpu\(0\)"),
        (lambda x: [nd.dot(x, x, transpose_b=True)] * 2, r"on cpu\(1\)"),
        (lambda x: ([x], [x, x]), r"float32 \(\*, 1\).*cpu\(1\)"),
        (lambda x: ({"a": x, "b": x}, {"b": x, "a": x}), r"\['b', 'a'\]|cpu\(1\)"),
        (lambda x: (x, x.tile((1, 2))), r"\(\*, 1\).*\(\*, 2\)"),
        (lambda x: (x, x.astype("float64")), r"float32.* float64"),
        (lambda x: [(x, SimpleNamespace(mean=x))] * 2, "output 1 .* an object"),
        (lambda x: [(x, iter([x]))] * 2, "output 1 .* an object"),
    ],
)
def test_outputs_that_are_refused(outputs, pattern, devices):
    """`outputs` returns the output of each device."""
    net = nn.Lambda(lambda x: outputs(x)[x.context.device_id])
    net, x = make_parallel(net, devices.contexts), column(1, 2, 3)
    with pytest.raises(ValueError, match=pattern), autograd.record():
        net(x)
