"""The first device owns parameters. A value that a program writes is the net's."""

import copy
from functools import partial

from gluon_syncbn import make_parallel, revert_parallel

import mxnet as mx
import pytest
from mxnet import autograd
from mxnet.gluon import Trainer, nn
from support.blocks import gluon_1_only, move
from support.helpers import cpus, differentiate, queue_hidden_write, set_mode, values
from support.nd import nd
from support.nets import (
    Net,
    Normalized,
    X,
    array,
    assert_same,
    dense,
    one_weight,
    started,
    state_of,
    train,
)

ONES = nd.ones((4, 1))


def one_layer(*more):
    net = nn.HybridSequential()
    net.add(nn.Dense(1, use_bias=False, in_units=1), *more)
    make_parallel(net, cpus(2)).initialize(mx.init.One())
    return net


def test_a_weight_that_the_program_has_written(tmp_path):
    """The norm divides by 2."""
    net = one_layer(nn.BatchNorm(in_channels=1, epsilon=3))
    shards = [ONES.as_in_context(context) for context in cpus(2)]
    net(ONES)
    with mx.cpu(1):
        net[0].weight.data()[:] = 3
    net.save_parameters(str(tmp_path / "net"))
    assert mx.nd.load(str(tmp_path / "net"))["0.weight"].asnumpy() == 3
    assert all((y.asnumpy() == 1.5).all() for y in net.devices.map(net, shards))
    net[0].weight.data()[:] = 5
    revert_parallel(net)
    assert all((net(x).asnumpy() == 2.5).all() for x in shards)
    move(net, cpus(1))
    differentiate(net, ONES).wait_to_read()  # the layer waits for no other device


@pytest.mark.parametrize("road", ["data", "list_data"])
def test_a_copy_is_read_after_an_array_that_the_program_kept_was_written(road):
    """Also by a child, which runs on the device of its argument."""
    net, last = one_layer(), mx.cpu(1)
    weight = net[0].weight
    kept = weight.data() if road == "data" else weight.list_data()[0]
    for value in 7, 5:
        assert weight.data(last).asnumpy() != value
        kept[:] = value
        assert weight.data(last).asnumpy() == value
        kept[:] = value + 1
        assert (net[0](ONES.as_in_context(last)).asnumpy() == value + 1).all()
        kept[:] = value + 2
        assert all(array.asnumpy() == value + 2 for array in weight.list_data())


def initialize_again(net):
    net.initialize(mx.init.Constant(0.75), force_reinit=True)
    net(array(X[:1]))


def freeze_for_a_small_batch(net):
    net.layers[0].weight.grad_req = "null"
    take_steps(net, [1])
    net.layers[0].weight.grad_req = "write"


def take_steps(net, sizes):
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.001})
    for rows in sizes:
        differentiate(lambda x: (net(x) ** 2).sum(), array(X[:rows]))
        trainer.step(1)


@pytest.mark.parametrize("change", [initialize_again, freeze_for_a_small_batch])
def test_arrays_that_are_replaced_before_a_device_is_skipped(change):
    """MXNet's graph in static_shape would use the former arrays."""
    results = []
    for contexts, mode in (cpus(2), "static_shape"), (None, "imperative"):
        net = started(Net(dense(), dense()), contexts, mode)
        take_steps(net, [6])
        change(net)
        take_steps(net, [6, 6])
        results.append(state_of(net))
    assert_same(*results)


def test_a_net_that_is_parallel_again_has_no_old_gradients():
    """A step without a backward changes nothing, whatever the momentum is."""
    results = []
    for contexts in cpus(2), None:
        net = started(Normalized(), contexts)
        settings = {"learning_rate": 0.125, "momentum": 0.5}
        trainer = Trainer(net.collect_params(), "sgd", settings)
        differentiate(lambda x, net=net: (net(x) ** 2).sum(), array(X))
        trainer.step(64)
        if contexts:
            make_parallel(revert_parallel(net), contexts)
        trainer.step(64, ignore_stale_grad=True)
        results.append(state_of(net))
    assert_same(*results)


def test_gradients_of_a_map_with_replaced_arrays():
    """MXNet's graph in static_shape would use the former arrays."""
    net = set_mode(one_layer(), "static_shape")
    weight, shards = net[0].weight, net.devices.split(ONES)
    for _ in range(3):
        net.devices.map(partial(differentiate, net), shards)
        assert [array.asnumpy().item() for array in weight.list_grad()] == [2, 2]
        weight.grad_req = "null"
        weight.grad_req = "write"


@gluon_1_only("nets of Gluon 2 hold weak references, which are not copied")
def test_a_copy_after_a_step_of_the_trainer():
    net = started(Normalized(), cpus(2))
    train(net)
    twin = copy.deepcopy(net)
    assert_same(values(twin), values(net))
    assert_same([twin(array(X)).asnumpy()], [net(array(X)).asnumpy()])


def test_a_step_after_a_net_was_reverted_sums_the_gradient_once():
    net = one_weight(cpus(2))
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
    differentiate(net, ONES)
    assert [gradient.asnumpy().item() for gradient in net.weight.list_grad()] == [4, 4]
    revert_parallel(net)
    trainer.step(4)
    assert [weight.asnumpy().item() for weight in net.weight.list_data()] == [0, 0]


def test_a_call_waits_for_predictions_before_it_copies():
    """oneDNN writes to weights in predictions; MXNet believes that they are read."""
    net = one_weight(cpus(2))
    net(ONES)
    queue_hidden_write(net.weight.data())
    with autograd.record():
        y = net(ONES)
    assert (y.asnumpy() == 2).all()


def test_gradients_of_parameters_that_only_a_penalty_reads():
    """No call of the net has made the first device's gradient the sum of all."""
    net = one_weight(cpus(2))
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25})
    for weight in 0.5, 0.25, 0.125:
        differentiate(lambda: net.weight.data() ** 2)
        trainer.step(1)
        assert net.weight.data().asnumpy() == weight
