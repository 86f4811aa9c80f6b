"""Gradients of a parallel net in whatever graph the caller builds around it."""

import threading

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import Block, Trainer, nn
from support.helpers import MODES, cpus, differentiate
from support.parallel_nets import (
    Traced,
    assert_same,
    batches,
    column,
    dense,
    gradients,
    pair,
    weight_gradient,
)  # fmt: skip

import gluon_syncbn
from gluon_syncbn import make_parallel

# Functions of two nets, an input, and an array above it; each returns heads.


def two_calls(net, other, x, upstream):
    return [(net(x) * upstream).sum() + 10 * net(x[:1]).sum()]


def two_heads(net, other, x, upstream):
    return [net(x).sum(), 10 * net(x[1:]).sum()]


def one_net_feeds_another_and_itself(net, other, x, upstream):
    hidden = net(x)
    return [(other(hidden * 1) + other(other(hidden))).sum() + hidden.sum()]


def an_input_is_used_beside_the_net(net, other, x, upstream):
    x = x * upstream
    return [net(x).sum() + (x * 10).sum()]


def the_loss_uses_a_parameter_itself(net, other, x, upstream):
    (weight,) = net.collect_params().values()
    return [net(x).sum() + 5 * (weight.data(mx.cpu(0)) ** 2).sum()]


GRAPHS = [
    two_calls,
    two_heads,
    one_net_feeds_another_and_itself,
    an_input_is_used_beside_the_net,
    the_loss_uses_a_parameter_itself,
]


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("request_", [None, "write", "add"])
def test_graph(request_, graph, devices):
    """The numbers are whole and small, so that any order of sums is exact."""
    results = []
    for contexts in None, devices.contexts:
        nets = dense(contexts, 2.0), dense(contexts, 3.0)
        x, upstream = column(1, 2, 3), mx.nd.array([3.0])
        upstream.attach_grad()
        if request_:
            x.attach_grad(request_)
        for _ in range(2):
            with autograd.record():
                heads = graph(*nets, x, upstream)
            autograd.backward(heads)
        of_nets = [weight_gradient(net) for net in nets]
        of_x = list(x.grad.asnumpy()[:, 0]) if request_ else []
        results.append([*of_nets, upstream.grad.asscalar(), *of_x])
    assert results[1] == results[0] and results[0][0] > 0


@pytest.mark.parametrize("attach", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_net_with_batch_norm_is_called_twice(mode, heads, attach):
    """Running statistics join the graphs of the two calls."""
    plain, parallel = pair(cpus(2), mode=mode)
    ((x, _),) = batches([7])
    results = {}
    for net in plain, parallel:
        if attach:
            x.attach_grad()
        with autograd.record():
            first, second = ((net(part) ** 2).sum() for part in (x[:3], x[3:]))
            total = [first + second] if heads == 1 else [first, second]
        autograd.backward(total)
        results[net] = gradients(net)
        results[net] += [x.grad.asnumpy()] if attach else []
        mx.nd.waitall()
    for result, expected in zip(results[parallel], results[plain]):
        assert_same(result, expected)


def test_calls_of_two_scopes_with_one_backward_each(devices):
    net, other = dense(devices.contexts), mx.nd.ones(1)
    other.attach_grad()
    with autograd.record():
        first = net(column(1, 2)).sum()
        beside = other * 3
    with autograd.record():
        second = net(column(5, 6)).sum()
    beside.backward()  # of another graph
    assert weight_gradient(net) == 0
    second.backward()
    assert weight_gradient(net) == 11
    first.backward()
    assert weight_gradient(net) == 3 and other.grad.asscalar() == 3


class Product(Block):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(1, use_bias=False, in_units=1)

    def forward(self, a, b):
        return self.dense(a) * b


@pytest.mark.parametrize("how", ["recorded elsewhere", "grad_req='null'"])
def test_input_that_needs_no_gradient_before_one_that_does(how, devices):
    net = make_parallel(Product(), devices.contexts)
    net.initialize(mx.init.One())
    a, upstream = column(1, 2), mx.nd.array([3.0])
    upstream.attach_grad()
    if how == "grad_req='null'":
        a.attach_grad("null")
    with autograd.record():
        if how == "recorded elsewhere":
            a * upstream  # MXNet marks a as a variable without gradient
        total = net(a, column(5, 6) * upstream).sum()
    total.backward()
    assert upstream.grad.asscalar() == 5 * 1 + 6 * 2


def test_inputs_of_several_dtypes_and_shapes(devices):
    class Mixed(Block):
        def forward(self, a, b, c):
            a, c = a.astype("float64"), c.astype("float64")
            return a.sum(axis=(1, 2), keepdims=True) * b + c.reshape((-1, 1, 1))

    results = []
    for net in Mixed(), make_parallel(Mixed(), devices.contexts):
        a = mx.nd.arange(12).reshape((3, 2, 2)).astype("float16")
        b = mx.nd.array([[[1.0]], [[2.0]], [[4.0]]], dtype="float64") / 3
        c = mx.nd.array([1, 2, 3], dtype="float32")
        for x in (a, b, c):
            x.attach_grad()
        differentiate(lambda *xs, net=net: (net(*xs) ** 2).sum(), a, b, c)
        results.append([x.grad for x in (a, b, c)])
    for expected, result in zip(*results):
        assert result.dtype == expected.dtype and abs(expected).max() > 0
        np.testing.assert_array_equal(result.asnumpy(), expected.asnumpy())


def test_backward_inside_of_the_scope_and_twice(devices):
    net = dense(devices.contexts)
    with autograd.record():
        total = net(column(1, 2)).sum()
        total.backward(retain_graph=True)
        assert weight_gradient(net) == 3
        with autograd.pause():
            net.net.weight.zero_grad()
        total.backward()
    assert weight_gradient(net) == 3


@pytest.mark.parametrize("attach", [True, False])
def test_backward_from_another_thread(attach, devices):
    net, x = dense(devices.contexts, 2.0), column(1, 2)
    if attach:
        x.attach_grad()
    with autograd.record():
        total = net(x).sum()
    thread = threading.Thread(target=total.backward)
    thread.start()
    thread.join()
    assert weight_gradient(net) == 3
    assert not attach or (x.grad.asnumpy() == 2).all()


def test_an_error_in_the_loss_arrives_with_the_gradient_of_the_input(devices):
    net, x = dense(devices.contexts), column(1, 2)
    x.attach_grad()
    with autograd.record():
        total = (net(x) * mx.nd.random.normal(0, -1, shape=(2, 1))).sum()
    total.backward()
    with pytest.raises(mx.MXNetError, match="scale parameter"):
        x.grad.wait_to_read()
    gluon_syncbn.recover()
    differentiate(net, x)
    assert weight_gradient(net) == 3


def test_sparse_parameters_do_not_matter(devices):
    class Sparse(Block):
        def __init__(self):
            super().__init__()
            self.weight = self.params.get(
                "sparse", shape=(3, 2), stype="row_sparse", grad_stype="row_sparse"
            )

        def forward(self, x):
            return x * 1

    net = make_parallel(Sparse(), devices.contexts)
    net.initialize()
    beside, x = dense(devices.contexts), column(1, 2)
    x.attach_grad()
    differentiate(lambda: net(x).sum() + beside(x).sum())
    assert weight_gradient(beside) == 3
    gluon_syncbn.check_replicas(net)


def test_stale_gradients_are_noticed_as_ever(devices):
    net = dense(devices.contexts)
    trainer = Trainer(net.collect_params(), "sgd", update_on_kvstore=False)
    differentiate(net, column(1, 2))
    trainer.step(1)
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        trainer.step(1)


@pytest.mark.parametrize("attach", [True, False])
def test_graphs_are_freed(attach, devices):
    net, traced = nn.Sequential(), Traced()
    net.add(nn.Dense(1, in_units=1), traced)
    net = make_parallel(net, devices.contexts)
    net.initialize()
    x = column(1, 2)
    if attach:
        x.attach_grad()
    for _ in range(3):  # two without backward
        with autograd.record():
            total = net(x).sum()
    assert traced.count_graphs() == 2  # of the last call, on two devices
    total.backward()
    assert traced.count_graphs() == 0
