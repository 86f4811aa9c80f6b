"""Gradients of a parallel net in whatever graph the caller builds around it."""

import threading

import mxnet as mx
import pytest
from mxnet import autograd
from mxnet.gluon import Block, Trainer, nn
from support.helpers import MODES, cpus, differentiate, summed_grad
from support.parallel_nets import (
    Traced,
    assert_same,
    batches,
    column,
    dense,
    pair,
    parameters,
    weight_gradient,
)  # fmt: skip

import gluon_syncbn
from gluon_syncbn import make_parallel


def test_two_calls_in_one_graph_add_up(devices):
    net = dense(devices.contexts)
    differentiate(lambda: net(column(1, 2, 3)).sum() + 10 * net(column(4)).sum())
    assert weight_gradient(net) == 6 + 40


def two_calls(net, x):
    return (net(x[:3]) ** 2).sum() + (net(x[3:]) ** 2).sum()


def two_heads(net, x):
    return [(net(x[:3]) ** 2).sum(), (net(x[3:]) ** 2).sum()]


@pytest.mark.parametrize("attach", [True, False])
@pytest.mark.parametrize("function", [two_calls, two_heads])
@pytest.mark.parametrize("mode", MODES)
def test_a_net_with_batch_norm_is_called_twice(mode, function, attach):
    """Running statistics join the graphs of the two calls."""
    plain, parallel = pair(cpus(2), mode=mode)
    ((x, _),) = batches([7])
    results = {}
    for net in plain, parallel:
        if attach:
            x.attach_grad()
        with autograd.record():
            heads = function(net, x)
        autograd.backward(heads)
        results[net] = [summed_grad(p) for p in parameters(net) if p.grad_req != "null"]
        results[net] += [x.grad.asnumpy()] if attach else []
        mx.nd.waitall()
    for result, expected in zip(results[parallel], results[plain]):
        assert_same(result, expected)


def test_calls_of_two_scopes_with_one_backward_each(devices):
    net = dense(devices.contexts)
    with autograd.record():
        first = net(column(1, 2)).sum()
    with autograd.record():
        second = net(column(5, 6)).sum()
    second.backward()
    assert weight_gradient(net) == 11
    first.backward()
    assert weight_gradient(net) == 3


def test_one_net_feeds_another_and_itself(devices):
    a, b = dense(devices.contexts, 2.0), dense(devices.contexts, 3.0)
    x = column(1, 2, 3)
    x.attach_grad()
    with autograd.record():
        hidden = a(x)
        total = (b(hidden * 1) + b(b(hidden))).sum() + hidden.sum()
    total.backward()
    # 3 * 2 x + 9 * 2 x + 2 x
    assert (x.grad.asnumpy() == 6 + 18 + 2).all()
    assert weight_gradient(a) == 6 * (3 + 9 + 1)
    assert weight_gradient(b) == 6 * (2 + 2 * 6)


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
        with autograd.record():
            total = (net(a, b, c) ** 2).sum()
        total.backward()
        results.append([x.grad for x in (a, b, c)])
    for expected, result in zip(*results):
        assert result.dtype == expected.dtype and abs(expected).max() > 0
        assert (result == expected).asnumpy().all()


def test_input_that_is_used_beside_the_net(devices):
    net = dense(devices.contexts, 2.0)
    upstream = mx.nd.array([3.0])
    upstream.attach_grad()
    with autograd.record():
        x = column(1, 2) * upstream
        total = net(x).sum() + (x * 10).sum()
    total.backward()
    assert upstream.grad.asscalar() == 2 * 3 + 10 * 3


def test_gradient_of_an_input_is_added(devices):
    net = dense(devices.contexts, 2.0)
    x = column(1, 2)
    x.attach_grad("add")
    for _ in range(3):
        differentiate(net, x)
    assert (x.grad.asnumpy() == 6).all()


def test_parameter_that_the_loss_uses_itself(devices):
    net = dense(devices.contexts, 2.0)
    weight = net.net.weight
    replica = weight.data(mx.cpu(0))
    differentiate(lambda: net(column(1, 2)).sum() + 5 * (replica**2).sum())
    assert weight_gradient(net) == 3 + 20


def test_gradients_with_grad_req_add(devices):
    net = dense(devices.contexts)
    net.net.weight.grad_req = "add"
    for rows in (column(1, 2), column(3)):
        differentiate(net, rows)
    assert weight_gradient(net) == 6


def test_a_device_that_sits_out_has_gradient_zero(devices):
    net = dense(devices.contexts)
    for rows in (column(1, 2), column(7)):
        differentiate(net, rows)
    assert [g.asnumpy().item() for g in net.net.weight.list_grad()] == [7, 0]


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_a_trainer_adds_up_where_a_device_sat_out(update_on_kvstore, devices):
    net = dense(devices.contexts)
    net.net.weight.grad_req = "add"
    trainer = Trainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": 0.125},
        update_on_kvstore=update_on_kvstore,
    )
    for rows in column(1), column(2, 3), column(4):
        for x in rows, rows:
            differentiate(net, x)
        trainer.step(1)
        net.collect_params().zero_grad()
    weights = [w.asscalar() for w in net.net.weight.list_data()]
    assert weights == [1 - 2 * (1 + 2 + 3 + 4) / 8] * 2


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


def test_an_error_in_the_loss_arrives_before_the_gradient_of_the_input(devices):
    net, x = dense(devices.contexts), column(1, 2)
    x.attach_grad()
    with autograd.record():
        total = (net(x) * mx.nd.random.normal(0, -1, shape=(2, 1))).sum()
    with pytest.raises(mx.MXNetError, match="scale parameter"):
        total.backward()
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


def test_backward_of_other_graphs_leaves_gradients_alone(devices):
    net = dense(devices.contexts)
    other = mx.nd.ones(1)
    other.attach_grad()
    with autograd.record():
        total = net(column(1, 2)).sum()
        beside = other * 3
    beside.backward()
    assert weight_gradient(net) == 0
    total.backward()
    assert weight_gradient(net) == 3 and other.grad.asscalar() == 3


def test_stale_gradients_are_noticed_as_ever(devices):
    net = dense(devices.contexts)
    trainer = Trainer(net.collect_params(), "sgd", update_on_kvstore=False)
    differentiate(net, column(1, 2))
    trainer.step(1)
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        trainer.step(1)


def traced_net(contexts):
    net, traced = nn.Sequential(), Traced()
    net.add(nn.Dense(1, in_units=1), traced)
    net = make_parallel(net, contexts)
    net.initialize()
    return net, traced


def test_a_graph_without_backward_is_freed(devices):
    net, traced = traced_net(devices.contexts)
    for _ in range(3):
        with autograd.record():
            y = net(column(1, 2))
    assert traced.count_graphs() == 2  # of the last call, on two devices
    del y
    assert traced.count_graphs() == 0


@pytest.mark.parametrize("attach", [True, False])
def test_nothing_is_kept_after_backward(attach, devices):
    net, traced = traced_net(devices.contexts)
    x = column(1, 2)
    if attach:
        x.attach_grad()
    with autograd.record():
        total = net(x).sum()
    assert traced.count_graphs() == 2
    total.backward()
    assert traced.count_graphs() == 0
