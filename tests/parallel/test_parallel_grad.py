"""autograd.grad through a parallel net is that of the plain net, for any variables."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from support.helpers import MODES, cpus
from support.parallel_nets import (
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


def grad(*arguments, **options):
    return [array.asnumpy() for array in autograd.grad(*arguments, **options)]


@pytest.mark.parametrize("rows", [7, 2])
@pytest.mark.parametrize("mode", MODES)
def test_inputs_parameters_and_what_is_above_the_net(mode, rows):
    """Two of the three devices have no more than two rows."""
    plain, parallel = pair(cpus(3), mode=mode)
    ((x, _),) = batches([rows])
    x.attach_grad()
    top = mx.nd.array([[1.0], [2.0], [3.0]], dtype="float64")
    top.attach_grad()
    results = {}
    for net in plain, parallel:
        net(x)  # initializes it
        learned = [p for p in parameters(net) if p.grad_req != "null"]
        for p in learned:
            for g in p.list_grad():
                g[:] = 7
        with autograd.record():
            head = mx.nd.dot(net(x) ** 2, top)
        weights = [data for p in learned for data in p.list_data()]
        head_gradient = mx.nd.arange(1, rows + 1, dtype="float64").reshape((-1, 1))
        of_top, of_x, *of_weights = grad(
            head, [top, x, *weights], head_gradient, retain_graph=True
        )
        for p in learned:
            assert all((g == 7).asnumpy().all() for g in p.list_grad())
        assert (x.grad == 0).asnumpy().all() and (top.grad == 0).asnumpy().all()
        count = len(learned[0].list_data())
        replicas = [of_weights[k : k + count] for k in range(0, len(weights), count)]
        if rows < count:
            assert all((parts[2] == 0).all() for parts in replicas)
        results[net] = [of_top, of_x, *map(sum, replicas)]
        head.backward(head_gradient)
        if mode != "static_shape":  # there MXNet's backward writes nothing after a grad
            written = [sum(g.asnumpy() for g in p.list_grad()) for p in learned]
            assert_same(x.grad.asnumpy(), results[net][1])
            for result, expected in zip(written, results[net][2:]):
                assert_same(result, expected)
        x.attach_grad()
        top.attach_grad()
        mx.nd.waitall()
    for result, expected in zip(results[parallel], results[plain]):
        assert_same(result, expected)


@pytest.mark.parametrize("attach", [True, False])
def test_one_replica_of_one_parameter(attach):
    """The other devices have to take part: their layers exchange gradients."""
    plain, parallel = pair(cpus(2))
    ((x, _),) = batches([6])
    if attach:
        x.attach_grad()
    results = []
    for net in plain, parallel:
        net(x)  # initializes it
        weight = parameters(net)[0]
        parts = []
        for data in weight.list_data():
            with autograd.record():
                head = (net(x) ** 2).sum()
            parts += grad(head, [data])
        results.append(sum(parts))
    assert_same(*results)


def test_calls_add_up_and_so_does_the_loss(devices):
    net = dense(devices.contexts, 2.0)
    x = column(1, 2, 3)
    beside = mx.nd.array([3.0])
    x.attach_grad()
    beside.attach_grad()
    weight = net.net.weight.data(mx.cpu(0))
    with autograd.record():
        hidden = net(x)
        total = net(hidden * 1).sum() + hidden.sum() + 5 * (weight**2).sum()
        total = total + 7 * beside
    of_x, of_weight, other, again, of_beside = grad(
        total, [x, *net.net.weight.list_data(), weight, beside]
    )
    assert (of_x == 4 + 2).all() and of_beside == 7 and weight_gradient(net) == 0
    assert of_weight + other == 6 * (2 + 2 + 1) + 20
    assert (again == of_weight).all()


def test_without_gather(devices):
    net = make_parallel(
        mx.gluon.nn.Dense(1, in_units=1), devices.contexts, gather=False
    )
    net.initialize(mx.init.One())
    criterion = gluon_syncbn.ParallelCriterion(mx.gluon.loss.L2Loss(), net)
    x = column(1, 2, 5)
    x.attach_grad()
    with autograd.record():
        loss = criterion(net(x), column(0, 0, 0))
    of_x, first, second = grad(loss, [x, *net.net.weight.list_data()])
    assert (of_x == x.asnumpy()).all()
    assert first + second == np.square([1, 2, 5]).sum()


def test_sparse_gradients(devices):
    class Embed(mx.gluon.Block):
        def __init__(self):
            super().__init__()
            self.embed = mx.gluon.nn.Embedding(4, 2, sparse_grad=True)

        def forward(self, x):
            return self.embed(x)

    net = make_parallel(Embed(), devices.contexts)
    net.initialize()
    with autograd.record():
        total = net(column(1, 3, 1)).sum() + net(column(0)).sum()
    results = autograd.grad(total, net.net.embed.weight.list_data())
    assert [result.stype for result in results] == ["row_sparse"] * 2
    summed = sum(result.asnumpy() for result in results)
    assert (summed[:, 0] == [1, 2, 0, 1]).all()


def test_second_derivatives_are_refused(devices):
    net, x = dense(devices.contexts), column(1, 2)
    x.attach_grad()
    with autograd.record():
        total = net(x).sum()
        with pytest.raises(ValueError, match="autograd.grad got create_graph=True"):
            autograd.grad(total, x, create_graph=True)
    total.backward()
    assert weight_gradient(net) == 3


def test_variables_that_the_heads_do_not_depend_on(devices):
    net, x, other = dense(devices.contexts), column(1, 2), column(3)
    x.attach_grad()
    beside = dense(devices.contexts)
    for wrong in other, beside.net.weight.data(mx.cpu(0)):
        with autograd.record():
            total = net(x).sum()
            beside(x)
        with pytest.raises(ValueError, match="variable 1 of autograd.grad is none"):
            autograd.grad(total, [x, wrong])
        total.backward()
        assert weight_gradient(net) == 3
