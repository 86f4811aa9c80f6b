"""make_parallel: equal to the same net on one device with the whole batch."""

import collections
import copy
import gc
import itertools
import threading
from functools import partial

import mxnet as mx
import numpy as np
import pytest
from helpers import MODES, assert_near, cpus, set_mode, summed_grad, value
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, Trainer, loss, nn

import gluon_syncbn
from gluon_syncbn import ParallelCriterion, _backward, make_parallel
from gluon_syncbn.batch_norm import SyncBatchNorm

SHAPE = 3, 6, 6


def small_net():
    net = nn.HybridSequential()
    norm = partial(nn.BatchNorm, momentum=0.875)  # what float32 holds exactly
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, padding=1), norm(), nn.Activation("relu"))
        net.add(nn.Conv2D(5, 3, strides=2), norm(), nn.Dense(3))
    return net


def pair(contexts, make_net=small_net, mode="imperative", **options):
    """The same float64 net: plain on one context, and parallel on `contexts`."""
    plain, template = make_net(), make_net()
    plain.cast("float64")
    template.cast("float64")
    mx.random.seed(3)
    plain.initialize(mx.init.Xavier())
    plain(mx.nd.ones((2, *SHAPE), dtype="float64"))
    parallel = make_parallel(template, contexts, **options)
    parallel.initialize()
    for mine, other in zip(parameters(parallel), parameters(plain)):
        mine.set_data(other.data().copy())
    return set_mode(plain, mode), set_mode(parallel, mode)


def parameters(net):
    return list(net.collect_params().values())


def batches(rows, seed=0):
    rng = np.random.default_rng(seed)
    for n in rows:
        x = mx.nd.array(rng.normal(1, 2, (n, *SHAPE)), dtype="float64")
        yield x, mx.nd.array(rng.integers(0, 3, n), dtype="float64")


def train(net, rows):
    """Gluon's usual loop for one device; returns losses."""
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    criterion = loss.SoftmaxCrossEntropyLoss()
    losses = []
    for x, label in batches(rows):
        with autograd.record():
            batch_loss = criterion(net(x), label)
        batch_loss.backward()
        trainer.step(len(x))
        losses.append(batch_loss.asnumpy())
    mx.nd.waitall()
    return losses


def assert_same(result, expected):
    scale = max(1.0, abs(expected).max())
    # 6 x 6 pixels of 9 images, and the sums of the steps before.
    assert_near(result, expected, "float64", count=2000, scale=scale)


def assert_replicas_equal(net):
    for parameter in parameters(net):
        for array in parameter.list_data()[1:]:
            assert (array.asnumpy() == value(parameter)).all(), parameter.name


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_every_batch_size_trains_like_one_device(mode, count):
    plain, parallel = pair(cpus(count), mode=mode)
    rows = [4, 1, 9, 2, 3, 5, 8, 1, 7, 6]
    for result, expected in zip(train(parallel, rows), train(plain, rows)):
        assert_same(result, expected)
    for mine, other in zip(parameters(parallel), parameters(plain)):
        assert_same(value(mine), value(other))
    assert_replicas_equal(parallel)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_gradients_and_outputs(rows):
    plain, parallel = pair(cpus(3))
    ((x, _),) = batches([rows])
    gradients = {}
    for net in plain, parallel:
        x.attach_grad()
        with autograd.record():
            y = net(x)
            total = (y**2).mean()
        total.backward()
        gradients[net] = [y.asnumpy(), x.grad.asnumpy()]
        for parameter in parameters(net):
            if parameter.grad_req != "null":
                gradients[net].append(summed_grad(parameter))
    assert len(gradients[plain]) == 2 + 10
    for result, expected in zip(gradients[parallel], gradients[plain]):
        assert abs(expected).max() > 0 or rows == 1
        assert_same(result, expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_inference_takes_every_batch_size(rows):
    plain, parallel = pair(cpus(4))
    ((x, _),) = batches([rows])
    y = parallel(x)
    assert y.context == mx.cpu(0) and y.shape == (rows, 3)
    assert_same(y.asnumpy(), plain(x).asnumpy())


def test_without_sync_bn_every_shard_is_normalized_by_itself(devices):
    net = make_parallel(nn.BatchNorm(), devices.contexts, sync_bn=False)
    net.initialize()
    with autograd.record():
        y = net(mx.nd.array([[0], [2], [5], [9]]))
    assert abs(y.asnumpy()[:, 0] - [-1, 1, -1, 1]).max() < 1e-4
    assert not isinstance(net.net, SyncBatchNorm)


# ---- structures ---------------------------------------------------------------------


class Nested(HybridBlock):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(2, flatten=False)

    def hybrid_forward(self, F, x, others):
        a, b = others
        return [self.dense(x) + a], (self.dense(b), F.argmax(x, axis=1))


class Dicts(Block):
    def forward(self, inputs, factor, mask=None):
        return {"out": inputs["x"] * factor, "mask": mask, "list": [inputs["y"] + 1]}


def test_nested_inputs_and_outputs(devices):
    net = make_parallel(Nested(), devices.contexts)
    net.initialize(mx.init.One())
    x = mx.nd.arange(6).reshape((3, 2))
    (first,), (second, classes) = net(x, [x, 2 * x])
    sums = x.asnumpy().sum(1, keepdims=True)
    assert (first.asnumpy() == sums + x.asnumpy()).all()
    assert (second.asnumpy() == 2 * sums * np.ones((1, 2))).all()
    assert (classes.asnumpy() == [1, 1, 1]).all()


def test_dicts_and_what_is_no_array(devices):
    net = make_parallel(Dicts(), devices.contexts)
    x = np.arange(3, dtype="float32")
    outputs = net({"x": x, "y": mx.nd.zeros((3, 2))}, 2.0)
    assert list(outputs) == ["out", "mask", "list"] and outputs["mask"] is None
    assert (outputs["out"].asnumpy() == [0, 2, 4]).all()
    assert outputs["list"][0].shape == (3, 2)


def test_dicts_keep_their_kind(devices):
    class Default(Block):
        def forward(self, x):
            outputs = collections.defaultdict(list)
            outputs["x"] = x
            return outputs

    outputs = make_parallel(Default(), devices.contexts)(column(1, 2))
    assert outputs["x"].shape == (2, 1) and outputs["y"] == []


def test_batch_axis(devices):
    net = make_parallel(nn.Dense(2, flatten=False), devices.contexts, batch_axis=1)
    net.initialize()
    assert net(mx.nd.ones((2, 5, 3))).shape == (2, 5, 2)


def test_numpy_semantics(devices):
    with mx.util.np_shape(True), mx.util.np_array(True):
        net = make_parallel(nn.Dense(1, use_bias=False), devices.contexts)
        net.initialize(mx.init.One())
        x = mx.np.array([[1.0], [2.0], [3.0]])
        x.attach_grad()
        with autograd.record():
            y = net(x)
            total = (y**2).sum()
        total.backward()
        assert type(y) is type(x)
        assert (x.grad.asnumpy()[:, 0] == [2, 4, 6]).all()
        assert summed_grad(net.net.weight) == 28


# ---- graphs of the caller -----------------------------------------------------------


def dense(contexts, weight=1.0):
    net = make_parallel(nn.Dense(1, use_bias=False, in_units=1), contexts)
    net.initialize(mx.init.Constant(weight))
    return net


def column(*values):
    return mx.nd.array(values).reshape((-1, 1))


def weight_gradient(net):
    return float(summed_grad(net.net.weight))


def test_two_calls_in_one_graph_add_up(devices):
    net = dense(devices.contexts)
    with autograd.record():
        total = net(column(1, 2, 3)).sum() + 10 * net(column(4)).sum()
    total.backward()
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
        with autograd.record():
            total = net(x).sum()
        total.backward()
    assert (x.grad.asnumpy() == 6).all()


def test_parameter_that_the_loss_uses_itself(devices):
    net = dense(devices.contexts, 2.0)
    weight = net.net.weight
    with autograd.record():
        total = net(column(1, 2)).sum() + 5 * (weight.data(mx.cpu(0)) ** 2).sum()
    total.backward()
    assert weight_gradient(net) == 3 + 20


def test_gradients_with_grad_req_add(devices):
    net = dense(devices.contexts)
    net.net.weight.grad_req = "add"
    for rows in (column(1, 2), column(3)):
        with autograd.record():
            total = net(rows).sum()
        total.backward()
    assert weight_gradient(net) == 6


def test_a_device_that_sits_out_has_gradient_zero(devices):
    net = dense(devices.contexts)
    for rows in (column(1, 2), column(7)):
        with autograd.record():
            total = net(rows).sum()
        total.backward()
    assert [g.asscalar() for g in net.net.weight.list_grad()] == [7, 0]


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


def test_autograd_grad_says_that_it_does_not_go_through(devices, capfd):
    net, x = dense(devices.contexts), column(1, 2)
    x.attach_grad()
    with autograd.record():
        total = net(x).sum()
    with pytest.raises(mx.MXNetError):
        autograd.grad(total, [x], retain_graph=True)[0].wait_to_read()
        mx.nd.waitall()
    assert "autograd.grad does not go through a parallel net" in capfd.readouterr().out
    gluon_syncbn.recover()
    total.backward()
    assert weight_gradient(net) == 3


def test_an_error_in_the_loss_arrives_before_the_gradient_of_the_input(devices):
    net, x = dense(devices.contexts), column(1, 2)
    x.attach_grad()
    with autograd.record():
        total = (net(x) * mx.nd.random.normal(0, -1, shape=(2, 1))).sum()
    with pytest.raises(mx.MXNetError, match="scale parameter"):
        total.backward()
    gluon_syncbn.recover()
    with autograd.record():
        total = net(x).sum()
    total.backward()
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
    with autograd.record():
        total = net(x).sum() + beside(x).sum()
    total.backward()
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
    with autograd.record():
        total = net(column(1, 2)).sum()
    total.backward()
    trainer.step(1)
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        trainer.step(1)


def test_a_graph_without_backward_is_freed(devices):
    net = dense(devices.contexts)
    gc.collect()
    before = len(_backward._calls)
    for _ in range(3):
        with autograd.record():
            y = net(column(1, 2))
    gc.collect()  # MXNet's functions are parts of reference cycles
    assert len(_backward._calls) == before + 1
    del y
    gc.collect()
    assert len(_backward._calls) == before


@pytest.mark.parametrize("attach", [True, False])
def test_nothing_is_kept_after_backward(attach, devices):
    net = dense(devices.contexts)
    x = column(1, 2)
    if attach:
        x.attach_grad()
    before = len(_backward._calls)
    with autograd.record():
        total = net(x).sum()
    assert len(_backward._calls) == before + 1
    total.backward()
    assert len(_backward._calls) == before


# ---- not gathered -------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_loss_where_the_outputs_are(rows):
    plain, parallel = pair(cpus(3), gather=False)
    criterion = loss.SoftmaxCrossEntropyLoss()
    there = ParallelCriterion(criterion, parallel)
    ((x, label),) = batches([rows])
    x.attach_grad()
    with autograd.record():
        expected = criterion(plain(x), label)
    expected.backward()
    expected_dx = x.grad.asnumpy()
    with autograd.record():
        outputs = parallel(x)
        losses = there(outputs, label)
    losses.backward()
    assert [y.context for y in outputs] == cpus(min(rows, 3))
    assert_same(losses.asnumpy(), expected.asnumpy())
    assert_same(x.grad.asnumpy(), expected_dx)
    for mine, other in zip(parameters(parallel), parameters(plain)):
        if mine.grad_req != "null":
            assert_same(summed_grad(mine), summed_grad(other))


def test_two_criteria_of_one_output_and_gradients_of_labels(devices):
    plain, net = nn.Dense(1), nn.Dense(1)
    plain.initialize(mx.init.One())
    net = make_parallel(net, devices.contexts, gather=False)
    net.initialize(mx.init.One())
    x, label = column(1, 2, 5), column(3, 4, 4)
    results = []
    for model, criteria in (
        (plain, [loss.L2Loss(), loss.L1Loss()]),
        (net, [ParallelCriterion(c, net) for c in (loss.L2Loss(), loss.L1Loss())]),
    ):
        x.attach_grad()
        label.attach_grad()
        with autograd.record():
            output = model(x)
            total = sum(c(output, label).sum() for c in criteria)
        total.backward()
        weight = model.collect_params(".*weight").values()
        arrays = [summed_grad(next(iter(weight))), x.grad.asnumpy()]
        results.append([total.asnumpy(), *arrays, label.grad.asnumpy()])
    for expected, result in zip(*results):
        assert abs(expected).max() > 0
        np.testing.assert_array_equal(result, expected)


# ---- saving -------------------------------------------------------------------------


def test_files_are_those_of_the_plain_net(tmp_path):
    plain, parallel = pair(cpus(3))
    train(parallel, [5, 2])
    path = str(tmp_path / "parallel.params")
    parallel.save_parameters(path)
    plain.load_parameters(path)
    for mine, other in zip(parameters(parallel), parameters(plain)):
        assert (value(mine) == value(other)).all()
    train(plain, [5])
    plain.save_parameters(path)
    parallel.load_parameters(path)
    for mine, other in zip(parameters(parallel), parameters(plain)):
        assert (value(mine) == value(other)).all()
    assert_replicas_equal(parallel)


def test_a_copy_has_devices_of_its_own(devices):
    net = dense(devices.contexts)
    other = copy.deepcopy(net)
    assert (other(column(1, 2)).asnumpy() == [[1], [2]]).all()
    assert other.devices is not net.devices


def test_load_parameters_takes_what_gluons_takes(tmp_path, devices):
    path = str(tmp_path / "other.params")
    other = nn.BatchNorm(in_channels=2)
    other.initialize()
    other.save_parameters(path)
    dense(devices.contexts).load_parameters(path, None, True, True)


def test_saving_while_training(tmp_path, devices):
    _, parallel = pair(devices.contexts, mode="static_shape")
    trainer = Trainer(parallel.collect_params(), "sgd")
    for (x, _), number in zip(batches([4] * 20), itertools.count()):
        with autograd.record():
            y = parallel(x).sum()
        y.backward()
        parallel.save_parameters(str(tmp_path / f"{number}.params"))
        trainer.step(4)


# ---- many steps ---------------------------------------------------------------------


@pytest.mark.timeout(280)
def test_replicas_stay_equal_over_random_batch_sizes():
    _, parallel = pair(cpus(4), mode="static_alloc")
    rows = np.random.default_rng(5).integers(1, 10, 200)
    losses = train(parallel, rows.tolist())
    assert all(np.isfinite(values).all() for values in losses)
    assert_replicas_equal(parallel)
    assert np.mean(losses[-1]) < np.mean(losses[0])


# ---- mistakes -----------------------------------------------------------------------


def test_bad_contexts():
    with pytest.raises(ValueError, match="contexts is empty"):
        make_parallel(nn.Dense(1), [])
    for contexts in (None, 2, "cpu"):
        with pytest.raises(TypeError, match="contexts is a list .* but got"):
            make_parallel(nn.Dense(1), contexts)
    with pytest.raises(ValueError, match=r"names cpu\(0\) 2 times"):
        make_parallel(nn.Dense(1), [mx.cpu(0), mx.cpu(0)])
    with pytest.raises(TypeError, match="net is a gluon.Block .* not parallel yet"):
        make_parallel(make_parallel(nn.Dense(1), cpus(2)), cpus(2))
    with pytest.raises(TypeError, match="net is a gluon.Block"):
        make_parallel(abs, cpus(2))


def test_net_on_other_contexts(devices):
    net = nn.Dense(1, prefix="mine_")
    net.initialize(ctx=mx.cpu(3))
    expected = r"'mine_weight' is initialized on cpu\(3\), expected cpu\(0\), cpu\(1\)"
    with pytest.raises(ValueError, match=expected):
        make_parallel(net, devices.contexts)
    parallel = make_parallel(nn.Dense(1), devices.contexts)
    with pytest.raises(ValueError, match=r"ctx is cpu\(3\), but .* cpu\(0\), cpu\(1\)"):
        parallel.initialize(ctx=mx.cpu(3))
    parallel.net.initialize(ctx=mx.cpu(0))
    with pytest.raises(ValueError, match=r"initialized on cpu\(0\), expected cpu\(0\)"):
        parallel(mx.nd.ones((2, 2)))


@pytest.mark.parametrize(
    "words, inputs",
    [
        ("have 2, 3 rows along axis 0, expected equal", (np.ones(2), np.ones(3))),
        ("batch has 0 rows", (np.ones((0, 3)),)),
        ("hold no array", (None, 2)),
    ],
)
def test_bad_batches(words, inputs, devices):
    with pytest.raises(ValueError, match=words):
        make_parallel(nn.Dense(1), devices.contexts)(*inputs)


def test_outputs_without_rows(devices):
    net = make_parallel(nn.HybridLambda(lambda F, x: F.mean(x)), devices.contexts)
    expected = r"output 0 has shape \(1,\) on cpu\(0\), expected 2 rows along axis 0"
    with pytest.raises(ValueError, match=expected):
        net(column(1, 2, 3))


def test_bad_batch_axis(devices):
    with pytest.raises(TypeError, match="batch_axis is an int, but got 'a'"):
        make_parallel(nn.Dense(1), devices.contexts, batch_axis="a")
    net = make_parallel(nn.Dense(1), devices.contexts, batch_axis=3)
    with pytest.raises(ValueError, match=r"batch_axis is 3, but .* shape \(2, 1\)"):
        net(column(1, 2))


def test_criterion_of_something_else(devices):
    net = make_parallel(nn.Dense(1), devices.contexts, gather=False)
    net.initialize()
    with pytest.raises(TypeError, match="net is what make_parallel returns"):
        ParallelCriterion(loss.L2Loss(), net.net)
    criterion = ParallelCriterion(loss.L2Loss(), net)
    with pytest.raises(TypeError, match="output is what a net of make_parallel"):
        criterion(mx.nd.ones((2, 1)), mx.nd.ones((2, 1)))
    output = net(mx.nd.ones((2, 1)))
    with pytest.raises(ValueError, match="labels have 3 rows, but .* had 2"):
        criterion(output, mx.nd.ones((3, 1)))


def test_error_in_backward_reaches_the_caller(devices):
    class Fails(autograd.Function):
        def forward(self, x):
            return x * 1

        def backward(self, dy):
            raise RuntimeError("mine")

    class Net(Block):
        def forward(self, x):
            return Fails()(x)

    net = make_parallel(Net(), devices.contexts)
    x = column(1, 2)
    x.attach_grad()
    with autograd.record():
        total = net(x).sum()
    total.backward()
    with pytest.raises(mx.MXNetError):
        x.grad.wait_to_read()
        mx.nd.waitall()
    gluon_syncbn.recover()
    assert_works = dense(devices.contexts)
    with autograd.record():
        total = assert_works(column(1, 2)).sum()
    total.backward()
    assert weight_gradient(assert_works) == 3
