"""The first device owns parameters. A value that a program writes is the net's."""

import copy
from functools import partial

from gluon_syncbn import (
    check_replicas,
    make_parallel,
    recompute_statistics,
    revert_parallel,
)

import mxnet as mx
import pytest
from mxnet import autograd
from mxnet.gluon import Trainer, nn
from support.blocks import gluon_1_only, move
from support.helpers import cpus, differentiate, queue_hidden_write, values
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


def weight_of(net):
    return net[0].weight


def on_one_device(net):
    revert_parallel(net)
    move(net, cpus(1))
    return [net(ONES)]


def in_a_loop(net):
    revert_parallel(net)
    return [net(ONES.as_in_context(context)) for context in cpus(2)]


def mapped(net):
    return net.devices.map(net, [ONES.as_in_context(context) for context in cpus(2)])


def checked(net):
    check_replicas(net)
    return []


def copied(net):
    return [weight_of(copy.deepcopy(net)).data()]


def saved(net, tmp_path):
    net.save_parameters(str(tmp_path / "net"))
    return [mx.nd.load(str(tmp_path / "net"))["0.weight"]]


def stepped(net):
    Trainer(net.collect_params(), "sgd", {"learning_rate": 0}).step(1)
    return weight_of(net).list_data()


def recomputed(net):
    recompute_statistics(net, [nd.array([[1], [3]])])
    return net[1].running_mean.list_data()


USES = {
    **{on_one_device: 1.5, in_a_loop: 1.5, mapped: 1.5, checked: None},
    **{copied: 3, saved: 3, stepped: 3, recomputed: 6},
}


@gluon_1_only("nets of Gluon 2 hold weak references, which are not copied")
@pytest.mark.parametrize("current", cpus(2), ids=str)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_weight_that_the_program_has_written(use, current, tmp_path):
    """The weight changes from 1 to 3. The norm divides by 2."""
    net = nn.HybridSequential()
    net.add(nn.Dense(1, use_bias=False, in_units=1))
    net.add(nn.BatchNorm(in_channels=1, epsilon=3))
    make_parallel(net, cpus(2)).initialize(mx.init.One())
    with autograd.record(train_mode=False):
        y = net(ONES)
    y.backward()
    with current:
        weight_of(net).data()[:] = 3
    found = use(net, *[tmp_path] if use is saved else [])
    assert all((array.asnumpy() == USES[use]).all() for array in found)


def through_list_data(net):
    return weight_of(net).list_data()[0]


def through_data(net):
    return weight_of(net).data()


@pytest.mark.parametrize("road", [through_data, through_list_data])
def test_a_copy_is_read_after_an_array_that_the_program_kept_was_written(road):
    """Also by a child, which runs on the device of its argument."""
    net = nn.HybridSequential()
    net.add(nn.Dense(1, use_bias=False, in_units=1))
    make_parallel(net, cpus(2)).initialize(mx.init.One())
    first, last = cpus(2)
    kept = road(net)
    for value in 7, 5:
        assert weight_of(net).data(last).asnumpy() != value
        kept[:] = value
        assert weight_of(net).data(last).asnumpy() == value
        kept[:] = value + 1
        assert (net[0](ONES.as_in_context(last)).asnumpy() == value + 1).all()


def test_a_net_that_has_values_before_it_is_parallel():
    results = []
    for contexts in cpus(2), None:
        net = started(Normalized(), None)
        if contexts:
            make_parallel(net, contexts, reset_ctx=True)
        differentiate(lambda x, net=net: (net(x) ** 2).sum(), array(X))
        results.append(
            [
                p.grad().asnumpy()
                for p in net.collect_params().values()
                if p.grad_req != "null"
            ]
        )
    assert_same(*results)


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


@gluon_1_only("nets of Gluon 2 hold weak references, which are not copied")
def test_a_copy_after_a_step_of_the_trainer():
    net = started(Normalized(), cpus(2))
    train(net)
    twin = copy.deepcopy(net)
    assert_same(values(twin), values(net))
    assert_same([twin(array(X)).asnumpy()], [net(array(X)).asnumpy()])


def test_a_reverted_net_trains_on_one_device():
    """Its layers were made for two devices."""
    results = []
    for contexts in cpus(2), None:
        net = started(Normalized(), contexts)
        differentiate(net, array(X))
        if contexts:
            revert_parallel(net)
        move(net, cpus(1))
        results.append(train(net))
    assert_same(*results)


def test_a_step_after_a_net_was_reverted_sums_the_gradient_once():
    net = one_weight(cpus(2))
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
    differentiate(net, ONES)
    assert [gradient.asnumpy().item() for gradient in net.weight.list_grad()] == [4, 4]
    revert_parallel(net)
    trainer.step(4)
    assert [weight.asnumpy().item() for weight in net.weight.list_data()] == [0, 0]


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
    """MXNet writes the gradients of a map itself, and a Trainer sums them."""
    results = []
    for contexts, mode in (cpus(2), "static_shape"), (None, "imperative"):
        net = started(Net(dense(), dense()), contexts, mode)
        trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.001})
        for _ in range(3):
            step = partial(differentiate, lambda x, net=net: (net(x) ** 2).sum())
            if contexts:
                net.devices.map(step, net.devices.split(array(X)))
            else:
                step(array(X))
            trainer.step(1)
            net.collect_params().setattr("grad_req", "null")
            net.collect_params().setattr("grad_req", "write")
        results.append(state_of(net))
    assert_same(*results)


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
