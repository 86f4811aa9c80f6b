"""Gradients of a parallel net in whatever graph the caller builds around it."""

from functools import partial

import gluon_syncbn
from gluon_syncbn import allow_plain_loop, make_parallel

import mxnet as mx
import pytest
from mxnet import autograd
from mxnet.gluon import Block, Trainer, nn
from support.blocks import gluon_1_only
from support.helpers import MODES, cpus, differentiate, summed_grad, value
from support.nd import nd
from support.parallel_nets import (
    Traced,
    assert_same,
    column,
    dense,
    gradients,
    parameters,
    weight_gradient,
)  # fmt: skip
from support.whole_programs import Net, X, array, results_of

# Each function of two nets, an input and an array above it returns heads.


def two_calls(net, other, x, upstream):
    return [(net(x) * upstream).sum() + 10 * net(x[:1]).sum()]


def two_heads(net, other, x, upstream):
    return [net(x).sum(), 10 * (net(x[1:]) * upstream).sum()]


def one_net_feeds_another_and_itself(net, other, x, upstream):
    hidden = net(x * upstream)
    return [((other(hidden * 1) + other(other(hidden))) ** 2).sum() + hidden.sum()]


def an_input_is_used_beside_the_net(net, other, x, upstream):
    x = x * upstream
    return [(net(x) ** 3).sum() + (x * 10).sum()]


def the_loss_uses_a_parameter_itself(net, other, x, upstream):
    weight = parameters(net)[0].data(mx.cpu(0))
    return [(net(x) * upstream).sum() + 5 * (weight**2).sum()]


GRAPHS = [
    two_calls,
    two_heads,
    one_net_feeds_another_and_itself,
    an_input_is_used_beside_the_net,
    the_loss_uses_a_parameter_itself,
]


def program_of(graph, grad_req, start):
    """Return all gradients; x has one if there is a `grad_req`.

    The nets' statistics may differ: MXNet's layer updates its own once a step.
    """
    norm = partial(nn.BatchNorm, in_channels=2, momentum=0.875)
    nets = [start(Net(nn.Dense(2, in_units=2), norm()), seed=seed) for seed in range(2)]
    x, upstream = array(X[:5]), array([3.0])
    upstream.attach_grad()
    if grad_req:
        x.attach_grad(grad_req)
    for _ in range(2):
        with autograd.record():
            heads = graph(*nets, x, upstream)
        autograd.backward(heads)
    written = [a.grad.asnumpy() for a in (upstream, x) if a.grad is not None]
    return (sum(map(gradients, nets), written),)


@pytest.mark.parametrize("grad_req", [None, "write", "add"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_graph(graph, mode, grad_req):
    program = partial(program_of, graph, grad_req)
    assert_same(results_of(program, cpus(2), mode), results_of(program, None, mode))


def test_calls_of_two_scopes_with_one_backward_each(devices):
    net, other = dense(devices.contexts), nd.ones(1)
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
    net, other = make_parallel(Sparse(), devices.contexts), dense(devices.contexts)
    net.initialize()
    with autograd.record():
        total = net(column(1, 3, 1)).sum() + net(column(0)).sum()
        total = total + other(column(1, 2)).sum()
    total.backward()
    assert [grad.stype for grad in net.embed.weight.list_grad()] == ["row_sparse"] * 2
    assert (summed_grad(net.embed.weight)[:, 0] == [1, 2, 0, 1]).all()
    assert weight_gradient(other) == 3
    gluon_syncbn.check_replicas(net)


def test_stale_gradients_are_noticed_as_ever(devices):
    net = dense(devices.contexts)
    trainer = Trainer(net.collect_params(), "sgd", update_on_kvstore=False)
    differentiate(net, column(1, 2))
    trainer.step(1)
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        trainer.step(1)


def test_a_failed_backward_leaves_earlier_gradients_to_the_trainer(devices):
    net, x = dense(devices.contexts), column(1, 2)
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    with autograd.record():
        first, second = net(x), net(x)
    first.backward()
    with pytest.raises(mx.MXNetError):  # the first call's graph is released
        autograd.backward([first, second])
    expected = value(net.weight) - weight_gradient(net)
    trainer.step(1)  # would refuse gradients that are not marked as new
    assert value(net.weight) == expected


@pytest.mark.parametrize("way", ["parallel", "plain loop"])
def test_autograd_grad_is_refused(way, devices):
    """It is MXNet's own, second gradients too, if no head depends on such a net."""
    if way == "parallel":
        net, x = dense(devices.contexts), column(1, 2)
    else:
        net, x = allow_plain_loop(nn.Dense(1, use_bias=False)), column(4)
        net.initialize(mx.init.One(), ctx=devices.contexts)
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
    net = dense(devices.contexts)
    with autograd.record():
        total = (net(x) * nd.random.normal(0, -1, shape=(2, 1))).sum()
    total.backward()
    with pytest.raises(mx.MXNetError, match="scale parameter"):
        x.grad.wait_to_read()
    gluon_syncbn.recover()
    differentiate(net, x)
    assert weight_gradient(net) == 3


@pytest.mark.parametrize("way", ["parallel", "from an input", "plain loop"])
def test_graphs_are_freed(way, devices):
    net, traced = nn.Sequential(), Traced()
    net.add(nn.Dense(1, in_units=1), traced)
    xs = [column(1, 2)]
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
    assert traced.count_graphs() == 2  # the last step's, on two devices
    autograd.backward(totals)
    assert traced.count_graphs() == 0


def test_a_result_without_a_variable_has_no_backward(devices):
    """Its factors are in another graph, so that MXNet records the product."""
    weight = dense(devices.contexts).weight
    factors = {context: nd.ones(1, ctx=context) for context in devices.contexts}
    net = make_parallel(nn.Lambda(lambda x: x * factors[x.context]), devices.contexts)
    with autograd.record():
        others = [weight.data(c) * factor for c, factor in factors.items()]
        y = net(column(1, 2))
    with pytest.raises(mx.MXNetError):
        y.backward()
    autograd.backward(others)


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
            found += [(x, y)[k].grad.asnumpy(), *gradients(net)]
        results.append(found)
    for result, expected in zip(*results):
        assert (result == expected).all()
