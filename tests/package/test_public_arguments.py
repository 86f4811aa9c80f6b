"""Every public function refuses what it does not take, in one sentence.

A row is a call and the words that it raises; each public name has rows, or a reason.
"""

import inspect
import re
from fractions import Fraction

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn
from support.helpers import cpus

import gluon_syncbn as g
from gluon_syncbn import distributed as d

TWO = cpus(2)
ARRAY = mx.nd.ones((4, 3))
REFUSED = ("object", "<U1", "complex128", "int16", "uint64", "datetime64[s]")


def dense(**options):
    net = g.make_parallel(nn.Dense(1, in_units=3), TWO, **options)
    net.initialize()
    return net


def layer():
    return g.SyncBatchNorm(in_channels=3)


def layer_of_one_channel():
    net = g.SyncBatchNorm(in_channels=1)
    net.initialize()
    return net


def monitored(batches):
    with g.Monitor(layer(), trainer()) as monitor:
        monitor.data(batches)


def join(timeout):
    d.Trainer(layer_of_one_channel(), "sgd").join(timeout)


def track(value):
    layer().num_batches_tracked = value


def participate(net, contexts):
    with g.participating(net, contexts):
        pass


def trainer():
    return mx.gluon.Trainer(dense().collect_params(), "sgd")


def criterion_of_another_net():
    first, second = dense(gather=False), dense(gather=False)
    criterion = g.ParallelCriterion(mx.gluon.loss.L2Loss(), second)
    criterion(first(ARRAY), mx.nd.ones((4, 1)))


def six_dimensions():
    net = layer()
    net.initialize()
    net(mx.nd.ones((2, 3, 1, 1, 1, 1))).wait_to_read()


def settings(**options):
    return lambda: g.SyncBatchNorm(**options)


def called(data):
    def call():
        net = layer()
        net.initialize()
        net(data)

    return call


def synchronize(**options):
    return lambda: layer().set_synchronization(**options)


def converted(**options):
    return lambda: g.convert_sync_batchnorm(nn.BatchNorm(), **options)


def paralleled(**options):
    return lambda: g.make_parallel(nn.Dense(1), **{"ctx": TWO, **options})


def sampled(length=8, batch_size=4, **options):
    return lambda: d.ShardSampler(length, batch_size, **options)


def dense_trainer(*arguments, **options):
    return lambda: d.Trainer(dense().net, *arguments, **options)


def step(batch_size, *options):
    return lambda: d.Trainer(layer_of_one_channel(), "sgd").step(batch_size, *options)


ROWS = {
    "SyncBatchNorm": [
        (settings(in_channels="3"), "in_channels is an int, but got '3'"),
        (settings(in_channels=-1), "in_channels is at least 0, but got -1"),
        (settings(num_devices=True), "num_devices is an int or None, but got True"),
        (settings(num_devices=0.5), "num_devices is an int or None, but got 0.5"),
        (settings(num_devices=0), "num_devices is at least 1, but got 0"),
        (settings(num_devices=10**10), "num_devices is at most 2147483647, but got"),
        (settings(momentum="0.9"), "momentum is between 0 and 1, or None, but got '0"),
        (settings(momentum=float("nan")), "momentum is between 0 and 1, or None, but"),
        (settings(epsilon=None), "epsilon is a finite number, not negative, but got"),
        (settings(epsilon="1e-5"), "epsilon is a finite number, not negative, but"),
        (settings(epsilon=-1e-5), "epsilon is a finite number, not negative, but"),
        (settings(center="no"), "center is True or False, but got 'no'"),
        (settings(scale=None), "scale is True or False, but got None"),
        (settings(use_global_stats=2), "use_global_stats is True or False, but got 2"),
        (settings(axis=None), "axis is an int, but got None"),
        (settings(unbiased_running_var="yes"), "unbiased_running_var is True or False"),
        (settings(timeout=True), "timeout is a positive number of seconds, or inf"),
        (settings(timeout="5"), "timeout is a positive number of seconds, or inf"),
        (settings(group=5), 'group is None, "machine", "process"'),
        (settings(activation="swish"), "activation is None, 'identity', 'relu'"),
        (
            settings(epsilon=10**400),
            "epsilon is a finite number, not negative, but got",
        ),
        (settings(epsilon=float("inf")), "epsilon is a finite number, not negative, b"),
        (settings(axis=5), "axis is at most 4, but got 5"),
        (settings(axis=-6), "axis is at least -5, but got -6"),
        (settings(in_channels=2**31), "in_channels is at most 2147483647, but got"),
        (settings(group=[[], [0]]), "group holds an empty list: [[], [0]], expected"),
        (settings(group=[[0], []]), "group holds an empty list: [[0], []], expected"),
        (settings(group=np.array(["machine"])), 'group is None, "machine", "process"'),
        (settings(group=np.array([0, 1])), 'group is None, "machine", "process"'),
        (settings(beta_initializer=5), "beta_initializer is a str or mxnet.init.Init"),
        (settings(gamma_initializer=5), "gamma_initializer is a str or mxnet.init.In"),
        (settings(running_mean_initializer=5), "running_mean_initializer is a str or"),
        (settings(running_variance_initializer=5), "running_variance_initializer is a"),
        (settings(activation=["relu"]), "activation is None, 'identity', 'relu'"),
        (settings(activation={}), "activation is None, 'identity', 'relu'"),
        (settings(activation="elu", slope=True), "slope is a positive number, but got"),
        (settings(slope=1), "slope is for 'leaky_relu' and 'elu', but got 1"),
        (called([ARRAY]), "data is an NDArray or Symbol, but got [ [[1. 1. 1.]"),
        (called(None), "data is an NDArray or Symbol, but got None"),
        (called(np.ones((2, 3))), "data is an NDArray or Symbol, but got array([["),
        (
            called(mx.nd.ones((2, 4))),
            "data has shape (2, 4), expected 3 channels along",
        ),
        (lambda: track(-1), "num_batches_tracked is at least 0, but got -1"),
        (lambda: track(2**70), f"num_batches_tracked is at most {2**62}, but got"),
        (lambda: track(1.5), "num_batches_tracked is an int, but got 1.5"),
        (six_dimensions, "data has 2 to 5 dimensions, but got 6"),
    ],
    "SyncBatchNorm.set_synchronization": [
        (synchronize(num_devices="a"), "num_devices is an int or None, but got 'a'"),
        (synchronize(group=5), 'group is None, "machine", "process"'),
        (synchronize(unbiased_running_var=1), "unbiased_running_var is True or False"),
        (synchronize(timeout="5"), "timeout is a positive number of seconds, or inf"),
    ],
    "SyncBatchNorm.set_activation": [
        (lambda: layer().set_activation(["relu"]), "activation is None, 'identity'"),
        (lambda: layer().set_activation("elu", "a"), "slope is a positive number, but"),
    ],
    "SyncBatchNorm.contexts": "takes nothing",
    "SyncBatchNorm.meetings": "takes nothing",
    "SyncBatchNorm.forward": "a call, see SyncBatchNorm",
    "SyncBatchNorm.hybrid_forward": "called by MXNet",
    "convert_sync_batchnorm": [
        (
            lambda: g.convert_sync_batchnorm(nn.BatchNorm(momentum="0.9", prefix="b_")),
            "momentum of b is between 0 and 1, or None, but got '0.9'",
        ),
        (lambda: g.convert_sync_batchnorm(None), "net is a gluon.Block, but got"),
        (converted(num_devices="2"), "num_devices is an int or None, but got '2'"),
        (converted(fuse="yes"), "fuse is True or False, but got 'yes'"),
        (converted(timeout=0), "timeout is a positive number of seconds, or inf"),
        (converted(unbiased_running_var=1), "unbiased_running_var is True or False"),
    ],
    "revert_sync_batchnorm": [
        (lambda: g.revert_sync_batchnorm("net"), "net is a gluon.Block, but got")
    ],
    "make_parallel": [
        (
            lambda: g.make_parallel(None, TWO),
            "net is a gluon.Block that is not paralle",
        ),
        (paralleled(ctx=None), "contexts is a list of mxnet.Context, but got None"),
        (paralleled(ctx=[]), "contexts is empty, expected at least one context"),
        (paralleled(gather="no"), "gather is True or False, but got 'no'"),
        (paralleled(batch_axis=True), "batch_axis is an int, but got True"),
        (paralleled(sync_bn=None), "sync_bn is True or False, but got None"),
        (paralleled(reset_ctx="cpu"), "reset_ctx is True or False, but got 'cpu'"),
    ],
    "ParallelNet": "made by make_parallel only",
    "ParallelNet.forward": [
        (lambda: dense()(None), "the inputs hold no array, expected at le"),
        *(
            (lambda dtype=dtype: dense()(np.ones((4, 3), dtype)), f"the dtype {dtype}")
            for dtype in REFUSED
        ),
        (
            lambda: dense()(ARRAY.tostype("csr")),
            "batch is a dense array, but got a csr",
        ),
    ],
    "ParallelNet.initialize": [
        (
            lambda: dense().initialize(ctx=5),
            "ctx is a list of mxnet.Context, but got 5",
        ),
    ],
    "ParallelNet.hybridize": "as in mxnet.gluon.Block",
    "ParallelNet.load_parameters": [
        (
            lambda: dense().load_parameters("a", ctx=5),
            "ctx is a list of mxnet.Context, but got 5",
        ),
        (lambda: dense().load_parameters(5), "filename is a path, but got 5"),
    ],
    "ParallelNet.save_parameters": [
        (lambda: dense().save_parameters(None), "filename is a path, but got None"),
        (lambda: dense().save_parameters(5), "filename is a path, but got 5"),
        (lambda: dense().save_parameters("a\0b"), "filename is a str without NUL and"),
        (lambda: dense().save_parameters("a", 5), "deduplicate is True or False, but"),
    ],
    "ParallelNet.export": [
        (lambda: dense().export(None), "path is a path, but got None"),
        (lambda: dense().export("a", "a"), "epoch is an int, but got 'a'"),
        (lambda: dense().export("a", True), "epoch is an int, but got True"),
        (lambda: dense().export("a", -1), "epoch is at least 0, but got -1"),
        (
            lambda: dense().export("a", 0, 5),
            "remove_amp_cast is True or False, but got",
        ),
    ],
    "ParallelNet.summary": [
        (lambda: dense().summary(None), "the inputs hold no array, expected at least"),
    ],
    "ParallelCriterion": [
        (
            lambda: g.ParallelCriterion(3, dense()),
            "loss is a Block or function, but got",
        ),
        (lambda: g.ParallelCriterion(len, 3), "net is what make_parallel returns, but"),
        (
            criterion_of_another_net,
            "output is from another net than the criterion's",
        ),
    ],
    "ParallelCriterion.forward": "a call, see ParallelCriterion",
    "ShardedOutput": "made by a ParallelNet only",
    "allow_plain_loop": [
        (lambda: g.allow_plain_loop(3), "net is a gluon.Block that is")
    ],
    "Devices": [
        (lambda: g.Devices(None), "contexts is a list of mxnet.Context, but got None"),
        (lambda: g.Devices([0]), "contexts is a list of mxnet.Context, but it holds 0"),
        (
            lambda: g.Devices(TWO).split([1, 2]),
            "batch is an NDArray or NumPy array, but",
        ),
        (lambda: g.Devices(TWO).split(None), "batch is an NDArray or NumPy array, but"),
        (
            lambda: g.Devices(TWO).split(ARRAY, 2),
            "batch_axis is 2, but batch has shape",
        ),
        (lambda: g.Devices(TWO).split(ARRAY, "0"), "batch_axis is an int, but got '0'"),
    ],
    "Devices.split": [
        *(
            (
                lambda dtype=dtype: g.Devices(TWO).split(np.ones((4, 3), dtype)),
                f"the dtype {dtype}",
            )
            for dtype in REFUSED
        ),
        *(
            (
                lambda kind=kind: g.Devices(TWO).split(ARRAY.tostype(kind)),
                f"batch is a dense array, but got a {kind}",
            )
            for kind in ("csr", "row_sparse")
        ),
    ],
    "Devices.map_first": [
        (lambda: g.Devices(TWO).map_first(5), "function is a function, but got 5"),
        (lambda: g.Devices(TWO).map_first(len, 5), "list 0 is a list with an element"),
    ],
    "Devices.close": "takes nothing",
    "Devices.map": [
        *(
            (
                lambda value=value: g.Devices(TWO).map(len, value),
                "list 0 is a list with an element for each context, but got",
            )
            for value in (np.array(3), list, {"a": 1, "b": 2})
        ),
        (lambda: g.Devices(TWO).map(None), "function is a function, but got None"),
        (lambda: g.Devices(TWO).map(len, 5), "list 0 is a list with an element for ea"),
        (
            lambda: g.Devices(TWO).map(len, [1]),
            "list 0 has 1 elements, expected one for",
        ),
    ],
    "participating": [
        (lambda: participate(None, TWO), "net is a gluon.Block, but got None"),
        (
            lambda: participate(layer(), None),
            "contexts is a list of mxnet.Context, but",
        ),
        (lambda: participate(layer(), [0]), "contexts is a list of mxnet.Context, but"),
        (lambda: participate(layer(), []), "contexts is empty, expected at least one"),
    ],
    "recover": [
        (lambda: g.recover(5), "reason is a str, but got 5"),
        (
            lambda: g.recover("\ud800"),
            "reason is a str without NUL and lone surrogates",
        ),
    ],
    "set_timeout": [
        (lambda: g.set_timeout("5"), "seconds is a positive number of seconds, or inf"),
        (
            lambda: g.set_timeout(True),
            "seconds is a positive number of seconds, or inf",
        ),
        (lambda: g.set_timeout(np.array([3.0])), "seconds is a positive number of sec"),
    ],
    "Monitor": [
        (lambda: g.Monitor(None, trainer()), "net is a gluon.Block, but got"),
        (lambda: g.Monitor(layer(), None), "trainer is a gluon.Trainer, but got"),
    ],
    "Monitor.data": [
        (lambda: monitored(5), "batches is an iterable, but got 5"),
    ],
    "Monitor.report": "takes nothing",
    "check_replicas": [
        (lambda: g.check_replicas(5), "net is a gluon.Block, but got 5")
    ],
    "available_contexts": "takes nothing",
    "features": "takes nothing",
    "get_timeout": "takes nothing",
    "keep_freed_memory": "takes nothing",
    "distributed": "a module, see below",
    "gluoncv": "a module; install takes nothing",
    "__version__": "a text",
}
DISTRIBUTED = {
    "Trainer": [
        (lambda: d.Trainer(None, "sgd"), "net is a gluon.Block, a ParameterDict or a"),
        (
            lambda: d.Trainer([], "sgd", None, 0),
            "bucket_megabytes is positive, but got",
        ),
        (
            lambda: d.Trainer([], "sgd", None, "4"),
            "bucket_megabytes is positive, but g",
        ),
        (lambda: d.Trainer([], "sgd"), "net has no parameters, expected at least one"),
        (dense_trainer(None), "optimizer is a name or mxnet.optimizer.Optimizer, but"),
        (dense_trainer(5), "optimizer is a name or mxnet.optimizer.Optimizer, but got"),
        (dense_trainer("sgd", 5), "optimizer_params is a dict or None, but got 5"),
    ],
    "Trainer.step": [
        *(
            (step(value), "batch_size is a finite number of samples, not negative, but")
            for value in ("4", float("nan"), -1, True, None, [4], float("inf"))
        ),
        (step(0), "batch_size is positive in at least one process, but got 0 in all"),
        (step(4, "x"), "ignore_stale_grad is True or False, but got 'x'"),
    ],
    "Trainer.join": [
        (lambda: join(0), "timeout is a positive number of seconds, or inf"),
    ],
    "ShardSampler": [
        (sampled(rank=-1, size=2), "rank is at least 0, but got -1"),
        (sampled(rank=2, size=2), "rank is at most 1, but got 2"),
        (sampled(rank=0, size=0), "size is at least 1, but got 0"),
        (sampled(length=-1), "length is at least 0, but got -1"),
        (sampled(length="8"), "length is an int, but got '8'"),
        (sampled(length=2**70), f"length is at most {2**63 - 1}, but got"),
        (sampled(rank=0, size=2**40), f"size is at most {2**31 - 1}, but got"),
        (
            sampled(batch_size=1, rank=0, size=2),
            "batch_size is at least one row for ea",
        ),
        (sampled(shuffle="no"), "shuffle is True or False, but got 'no'"),
        (sampled(seed=-1), "seed is at least 0, but got -1"),
    ],
    "ShardSampler.set_epoch": [
        (lambda: d.ShardSampler(8, 4).set_epoch(-1), "epoch is at least 0, but got -1"),
        (lambda: d.ShardSampler(8, 4).set_epoch("1"), "epoch is an int, but got '1'"),
    ],
    "allreduce": [
        (lambda: d.allreduce("five"), "array holds numbers, but got the dtype <U4"),
        (
            lambda: d.allreduce(np.uint64(2**63 + 5)),
            f"array fits int64, but holds {2**63 + 5}",
        ),
        (lambda: d.allreduce(2**63), f"array fits int64, but holds {2**63}"),
        (lambda: d.allreduce(5, name=5), "name is a str, but got 5"),
        (lambda: d.allreduce(5, name="\ud800"), "name is a str without NUL and lone"),
        (lambda: d.allreduce(5, name="a\0b"), "name is a str without NUL and lone sur"),
        (lambda: d.allreduce(5, timeout=0), "timeout is a positive number of seconds"),
    ],
    "allgather": [(lambda: d.allgather(5, name=None), "name is a str, but got None")],
    "barrier": [(lambda: d.barrier(-1), "timeout is a positive number of seconds")],
    "broadcast": [
        (lambda: d.broadcast(5, root=1), "root is a rank below 1, but got 1"),
        (lambda: d.broadcast(5, root=None), "root is an int, but got None"),
    ],
    "broadcast_parameters": [
        (lambda: d.broadcast_parameters(None), "net is a gluon.Block, a ParameterDict"),
        (
            lambda: d.broadcast_parameters(layer(), 7),
            "root is a rank below 1, but got 7",
        ),
        (lambda: d.broadcast_parameters(layer(), 0, 0), "timeout is a positive number"),
    ],
    "groups_of": [
        (lambda: d.groups_of(0), "k is at least 1, but got 0"),
        (lambda: d.groups_of(True), "k is an int, but got True"),
        (lambda: d.groups_of(2, 5), "contexts is a list of mxnet.Context, but got 5"),
        (lambda: d.groups_of(2, "abc"), "contexts is a list of mxnet.Context, but got"),
        (lambda: d.groups_of(2, [1, 2]), "contexts is a list of mxnet.Context, but it"),
        (
            lambda: d.groups_of(2, cpus(1) * 2),
            "contexts names cpu(0) 2 times, expected",
        ),
    ],
    "init": [(lambda: d.init(timeout="5"), "timeout is a positive number of seconds")],
    "join": [(lambda: d.join(timeout=0), "timeout is a positive number of seconds")],
    "is_initialized": "takes nothing",
    "local_rank": "takes nothing",
    "local_size": "takes nothing",
    "rank": "takes nothing",
    "shutdown": "takes nothing",
    "size": "takes nothing",
}


def rows(table):
    for name, found in table.items():
        for number, row in enumerate(found if isinstance(found, list) else []):
            yield pytest.param(*row, id=f"{name}-{number}")


@pytest.mark.parametrize("call, words", [*rows(ROWS), *rows(DISTRIBUTED)])
def test_refused_in_one_sentence(call, words):
    with pytest.raises((TypeError, ValueError, mx.MXNetError)) as caught:
        call()
    text = str(caught.value)
    assert re.search(re.escape(words), text), text
    if not isinstance(caught.value, mx.MXNetError):  # MXNet adds a stack trace
        assert "\n" not in text


def public(module):
    """The public names of a module, and the methods of its classes that it defines."""
    for name in module.__all__:
        value = getattr(module, name)
        yield name, value
        for method, function in vars(value).items() if isinstance(value, type) else ():
            if inspect.isfunction(function) and not method.startswith("_"):
                yield f"{name}.{method}", function


@pytest.mark.parametrize("table, module", [(ROWS, g), (DISTRIBUTED, d)])
def test_every_public_name_is_in_the_table(table, module):
    found = dict(public(module))
    assert set(table) == set(found)
    for name, row in table.items():
        if row == "takes nothing":
            own = "self" if "." in name else None
            assert set(inspect.signature(found[name]).parameters) <= {own}, name


def test_length_of_a_sampler_is_the_number_of_its_batches():
    for length in range(14):
        for rank in range(3):
            sampler = d.ShardSampler(length, 4, rank=rank, size=3)
            assert len(sampler) == len(list(sampler))
    assert len(d.ShardSampler(2**63 - 1, 4, rank=2, size=3)) == 2**61


def test_what_is_meant_is_taken():
    settings(num_devices=np.int64(2), scale=np.bool_(True), epsilon=np.float32(1e-5))()
    half = g.SyncBatchNorm(in_channels=3, momentum=Fraction(1, 2))
    half.initialize()
    with mx.autograd.train_mode():
        half(ARRAY).wait_to_read()
    assert (half.running_mean.data() == 0.5).asnumpy().all()
    sampled(np.int64(8), np.int32(4), rank=np.int64(0), size=1)()
