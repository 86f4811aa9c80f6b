"""Gradients of a parallel net in whatever graph the caller builds around it."""

import gc
import weakref

import gluon_syncbn
from gluon_syncbn import allow_plain_loop, make_parallel

import mxnet as mx
import pytest
from mxnet import autograd
from mxnet.gluon import Block, nn
from support.blocks import gluon_1_only
from support.helpers import differentiate, summed_grad
from support.nd import nd
from support.nets import column, one_weight, parameters_of, weight_gradient


def test_calls_of_two_scopes_with_one_backward_each(devices):
    net, other = one_weight(devices.contexts), nd.ones(1)
    other.attach_grad()
    with autograd.record():
        first = net(column(1, 2)).sum()
        beside = other * 3
    with autograd.record():
        second = net(column(5, 6)).sum()
        second.backward(retain_graph=True)  # inside of the scope
    beside.backward()  # it is in another graph
    assert weight_gradient(net) == 11
    for grad in net.weight.list_grad():
        grad[:] = 0
    second.backward()
    assert weight_gradient(net) == 11
    first.backward()
    assert weight_gradient(net) == 3 and other.grad.asnumpy() == 3


def two_inputs(devices):
    return make_parallel(nn.Lambda(lambda a, b: (a * b, b * 3)), devices.contexts)


@pytest.mark.parametrize("how", ["recorded elsewhere", "grad_req='null'"])
def test_input_that_needs_no_gradient_before_one_that_does(how, devices):
    net = two_inputs(devices)
    a, upstream = column(1, 2), nd.array([3.0])
    upstream.attach_grad()
    if how == "grad_req='null'":
        a.attach_grad("null")
    with autograd.record():
        if how == "recorded elsewhere":
            a * upstream  # MXNet marks a as a variable without gradient
        product, _ = net(a, column(5, 6) * upstream)
    product.backward()
    assert upstream.grad.asnumpy() == 5 * 1 + 6 * 2


class Sparse(Block):
    """An embedding, and a sparse parameter that is not used."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 2, sparse_grad=True)
        stypes = {"stype": "row_sparse", "grad_stype": "row_sparse"}
        self.unused = self.params.get("sparse", shape=(3, 2), **stypes)

    def forward(self, x):
        return self.embed(x)


@gluon_1_only("parameters are dense")
def test_sparse_parameters(devices):
    net, other = make_parallel(Sparse(), devices.contexts), one_weight(devices.contexts)
    net.initialize()
    with autograd.record():
        total = net(column(1, 3, 1)).sum() + net(column(0)).sum()
        total = total + other(column(1, 2)).sum()
    total.backward()
    assert [grad.stype for grad in net.embed.weight.list_grad()] == ["row_sparse"] * 2
    assert (summed_grad(net.embed.weight)[:, 0] == [1, 2, 0, 1]).all()
    assert weight_gradient(other) == 3
    gluon_syncbn.check_replicas(net)


def test_autograd_grad_is_refused(devices):
    """It is MXNet's own, second gradients too, if no head depends on such a net."""
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


# ---- ends of graphs ------------------------------------------------------------------


class Fails(autograd.Function):
    def forward(self, x):
        return x * 1

    def backward(self, dy):
        raise RuntimeError("mine")


def test_an_error_in_backward_reaches_the_caller(devices):
    """First one of a device's graph, then one of the loss."""
    net = make_parallel(nn.Lambda(lambda x: Fails()(x)), devices.contexts)
    x = column(1, 2)
    x.attach_grad()
    differentiate(net, x)
    with pytest.raises(mx.MXNetError):
        x.grad.wait_to_read()
        mx.nd.waitall()
    gluon_syncbn.recover()
    net = one_weight(devices.contexts)
    with autograd.record():
        total = (net(x) * nd.random.normal(0, -1, shape=(2, 1))).sum()
    total.backward()
    with pytest.raises(mx.MXNetError, match="scale parameter"):
        x.grad.wait_to_read()
    gluon_syncbn.recover()
    differentiate(net, x)
    assert weight_gradient(net) == 3


class Identity(autograd.Function):
    """It is alive as long as the graph of its call."""

    alive: weakref.WeakSet = weakref.WeakSet()

    def forward(self, x):
        self.alive.add(self)
        return x.copy()

    def backward(self, dy):
        return dy


def count_graphs():
    mx.nd.waitall()
    for _ in range(3):  # a graph's contents are freed after it
        gc.collect()
    return len(Identity.alive)


@pytest.mark.parametrize("way", ["parallel", "from an input", "plain loop"])
def test_graphs_are_freed(way, devices):
    net, xs = nn.Sequential(), [column(1, 2)]
    net.add(nn.Dense(1, in_units=1), nn.Lambda(lambda x: Identity()(x)))
    if way == "plain loop":
        net = allow_plain_loop(net)
        net.initialize(ctx=devices.contexts)
        xs = [column(1).as_in_context(context) for context in devices.contexts]
    else:
        net = make_parallel(net, devices.contexts)
        net.initialize()
    if way == "from an input":
        xs[0].attach_grad()
    for _ in range(3):  # two without backward
        with autograd.record():
            totals = [net(x).sum() for x in xs]
    assert count_graphs() == 2  # the last step's, on two devices
    autograd.backward(totals)
    assert count_graphs() == 0


class TwoOutputs(Block):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Dense(2, in_units=1) for _ in range(2))

    def forward(self, x, y):
        return self.first(x) ** 2, self.second(y) ** 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_output_has_a_backward(order, devices):
    """Each writes what its output depends on, and leaves the other's gradients."""
    results = []
    for net in TwoOutputs(), make_parallel(TwoOutputs(), devices.contexts):
        net.initialize(mx.init.One())
        x, y = column(1, 2, 3), column(4, 5, 6)
        x.attach_grad()
        y.attach_grad()
        with autograd.record():
            outputs = net(x * 1, y * 1)
        found = []
        for k in order:
            outputs[k].backward(retain_graph=True)
            found += [(x, y)[k].grad.asnumpy(), *map(summed_grad, parameters_of(net))]
        results.append(found)
    for result, expected in zip(*results):
        assert (result == expected).all()
