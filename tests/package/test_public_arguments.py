"""Every public function refuses what it does not take, in one sentence.

A row is a call, words of the error's text, and its class where that is known; each
public name has rows, or a reason.
"""

import inspect
from fractions import Fraction
from functools import partial

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn
from support.helpers import cpus

import gluon_syncbn as g
from gluon_syncbn import distributed as d

TWO = cpus(2)
ARRAY = mx.nd.ones((4, 3))
DTYPES = "object", "<U1", "complex128", "int16", "uint64", "datetime64[s]"
NAN, INF, HUGE, INT = float("nan"), float("inf"), 10**400, 2**31 - 1
FRACTION, NOT_NEGATIVE = "between 0 and 1, or None", "a finite number, not negative"
ACTIVATION = "None, 'identity', 'relu', 'leaky_relu' or 'elu'"
GROUP = (
    'None, "machine", "process", a list of ranks, a list of contexts, or a list of '
    "such lists"
)
VALUES = "beta", "gamma", "running_mean", "running_variance"
INITIALIZER = "a str or mxnet.init.Initializer"
CONTEXTS = "a list of mxnet.Context"
SHARDED = "give it to a ParallelCriterion, or make the net without gather=False"
LIST = "list 0 is a list with an element for each context, but got"
OPTIMIZER = "a name or mxnet.optimizer.Optimizer"
SAMPLES = "a finite number of samples, not negative"


# ---- calls ---------------------------------------------------------------------------


def initialized(net):
    net.initialize()
    return net


def layer():
    return initialized(g.SyncBatchNorm(in_channels=3))


def dense(contexts=TWO, **options):
    return initialized(g.make_parallel(nn.Dense(1, in_units=3), contexts, **options))


def trainer(**options):
    return d.Trainer(layer(), **{"optimizer": "sgd", **options})


def sampled(length=8, batch_size=4, **options):
    return d.ShardSampler(length, batch_size, **options)


def of(make, method):
    """A method of an object that is made for each call."""
    return lambda *arguments, **options: getattr(make(), method)(*arguments, **options)


norm, called = g.SyncBatchNorm, of(layer, "__call__")
elu = partial(norm, activation="elu")
forward, initialize = of(dense, "__call__"), of(dense, "initialize")
load, save = of(dense, "load_parameters"), of(dense, "save_parameters")
export, summary = of(dense, "export"), of(dense, "summary")
split, step = of(partial(g.Devices, TWO), "split"), of(trainer, "step")
map_each = of(partial(g.Devices, TWO), "map")
map_first = of(partial(g.Devices, TWO), "map_first")


def track(num_batches_tracked):
    layer().num_batches_tracked = num_batches_tracked


def convert(**options):
    g.convert_sync_batchnorm(nn.BatchNorm(), **options)


def broadcast(**options):
    d.broadcast_parameters(layer(), **options)


def sharded_to(function):
    output = dense(gather=False)(ARRAY)
    function(output, *[mx.nd.ones((4, 1))] * isinstance(function, mx.gluon.Block))


def hybridized_loss():
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    loss.hybridize()
    return loss


def criterion_of_another_net():
    first, second = dense(gather=False), dense(gather=False)
    criterion = g.ParallelCriterion(mx.gluon.loss.L2Loss(), second)
    criterion(first(ARRAY), mx.nd.ones((4, 1)))


def participate(net, contexts):
    with g.participating(net, contexts):
        pass


def monitored(batches):
    with g.Monitor(layer()) as monitor:
        monitor.data(batches)


def trainer_of_an_embedding():
    d.Trainer(initialized(nn.Embedding(2, 2, sparse_grad=True)), "sgd")


# ---- rows ----------------------------------------------------------------------------


def bad(function, error, expected, **values):
    """Rows in which one argument has one of several values, all refused alike."""
    for name, refused in values.items():
        for value in refused:
            words = f"{name} is {expected}, but got {repr(value)[:150]}"
            yield partial(function, **{name: value}), words, error


def wrong(function, *rows):
    """Rows of arguments, each with words of the ValueError that they raise."""
    for *arguments, words in rows:
        yield partial(function, *arguments), words, ValueError


def bad_bool(function, *names):
    values = dict.fromkeys(names, ["no", None, 2])
    return bad(function, TypeError, "True or False", **values)


def bad_seconds(function, name="timeout"):
    values = 0, -1, True, "5", "soon", NAN, -INF, -HUGE, [1], np.array([3.0])
    expected = "a positive number of seconds, or inf for never"
    return bad(function, ValueError, expected, **{name: values})


def bad_text(function, name):
    expected = "a str without NUL and lone surrogates"
    yield from bad(function, TypeError, "a str", **{name: [5, None]})
    yield from bad(function, ValueError, expected, **{name: ["\ud800", "a\0b"]})


def bad_contexts(function):
    yield from bad(function, TypeError, CONTEXTS, contexts=[2, "cpu"])
    for value in 0, "cpu":
        words = f"contexts is {CONTEXTS}, but it holds {value!r}"
        yield partial(function, contexts=[value]), words, TypeError
    words = "contexts is empty, expected at least one context"
    yield partial(function, contexts=[]), words, ValueError
    words = "contexts names cpu(0) 2 times, expected distinct contexts"
    yield partial(function, contexts=cpus(1) * 2), words, ValueError


def bad_batch(function):
    """Rows of arrays with a dtype or a storage that a batch cannot have."""
    for dtype in DTYPES:
        yield partial(function, np.ones((4, 3), dtype)), f"the dtype {dtype}", TypeError
    for kind in "csr", "row_sparse":
        words = f"batch is a dense array, but got a {kind} one"
        yield partial(function, ARRAY.tostype(kind)), words, TypeError


def no_block(function, kind="gluon.Block", shown=repr):
    for value in None, 3, "net", abs, []:
        words = f"net is a {kind}, but got {shown(value)}"
        yield partial(function, value), words, TypeError


def parallel_already(function, name):
    yield from no_block(function, "gluon.Block that is not parallel yet", type)
    words = f"net is parallel already and needs no {name}, expected a gluon.Block that"
    yield lambda: function(dense()), words, TypeError


def gpus_on_a_cpu_build():
    words = "contexts names gpu(1), but this MXNet was built for CPUs alone: expected"
    if not mx.runtime.Features().is_enabled("CUDA"):
        yield partial(g.Devices, [mx.cpu(0), mx.gpu(1)]), words, ValueError
        yield partial(dense, [mx.gpu(1), mx.gpu(0)]), words, ValueError


# ---- the tables ----------------------------------------------------------------------

ROWS = {
    "SyncBatchNorm": [
        *bad(norm, TypeError, "an int", in_channels=["3"], axis=[None, 1.5, "C"]),
        *bad(norm, TypeError, "an int or None", num_devices=[True, 0.5, 2.5, NAN]),
        *bad(norm, TypeError, "an int or None", num_devices=["2", "two", [2]]),
        *bad(norm, ValueError, "at least 0", in_channels=[-1]),
        *bad(norm, ValueError, "at least 1", num_devices=[0, -1]),
        *bad(norm, ValueError, "at least -5", axis=[-6]),
        *bad(norm, ValueError, "at most 4", axis=[5]),
        *bad(
            norm,
            ValueError,
            f"at most {INT}",
            in_channels=[2**31],
            num_devices=[10**10],
        ),
        *bad(norm, TypeError, FRACTION, momentum=["0.9"]),
        *bad(norm, ValueError, FRACTION, momentum=[1.5, -1, NAN]),
        *bad(norm, TypeError, NOT_NEGATIVE, epsilon=[None, "1e-5"]),
        *bad(norm, ValueError, NOT_NEGATIVE, epsilon=[-1e-5, -1, NAN, INF, HUGE]),
        *bad_bool(norm, "center", "scale", "use_global_stats", "unbiased_running_var"),
        *bad_seconds(norm),
        *bad(norm, TypeError, GROUP, group=[5, "all", [0, mx.cpu()]]),
        *bad(norm, TypeError, GROUP, group=[np.array(["machine"]), np.array([0, 1])]),
        (partial(norm, group=[[], [0]]), "group holds an empty list: [[], [0]], expec"),
        (partial(norm, group=[[0], []]), "group holds an empty list: [[0], []], expec"),
        (partial(norm, group=[[0, 1], [1]]), "group names 1 2 times"),
        (partial(norm, group=[-1]), "group names the rank -1, expected 0 or more"),
        *bad(norm, TypeError, INITIALIZER, **{f"{v}_initializer": [5] for v in VALUES}),
        *bad(norm, ValueError, ACTIVATION, activation=["swish", ["relu"], {}]),
        *bad(elu, ValueError, "a positive number", slope=[True, 0, -0.1, NAN]),
        *bad(elu, TypeError, "a positive number", slope=["a"]),
        (partial(norm, slope=1), "slope is for 'leaky_relu' and 'elu', but got 1"),
        (
            partial(norm, activation="relu", slope=0.1),
            "slope is for 'leaky_relu' and 'elu', but got 0.1 with activation='relu'",
        ),
        (partial(called, [ARRAY]), "data is an NDArray or Symbol, but got [ [[1. 1. 1"),
        (partial(called, None), "data is an NDArray or Symbol, but got None"),
        (partial(called, np.ones((2, 3))), "data is an NDArray or Symbol, but got arr"),
        (
            partial(called, mx.nd.ones((2, 4))),
            "data has shape (2, 4), expected 3 channels along",
        ),
        (
            partial(called, mx.nd.ones((2, 3, 1, 1, 1, 1))),
            "data has 2 to 5 dimensions, but got 6",
        ),
        *bad(track, ValueError, "at least 0", num_batches_tracked=[-1]),
        *bad(track, ValueError, f"at most {2**62}", num_batches_tracked=[2**70]),
        *bad(track, TypeError, "an int", num_batches_tracked=[1.5]),
    ],
    "SyncBatchNorm.contexts": "takes nothing",
    "SyncBatchNorm.groups": "takes nothing",
    "SyncBatchNorm.forward": "a call, see SyncBatchNorm",
    "SyncBatchNorm.hybrid_forward": "called by MXNet",
    "convert_sync_batchnorm": [
        (
            lambda: g.convert_sync_batchnorm(nn.BatchNorm(momentum="0.9", prefix="b_")),
            "momentum of b is between 0 and 1, or None, but got '0.9'",
        ),
        *no_block(g.convert_sync_batchnorm),
        *bad(convert, TypeError, "an int or None", num_devices=["2"]),
        *bad_bool(convert, "fuse", "unbiased_running_var"),
        *bad_seconds(convert),
    ],
    "revert_sync_batchnorm": [*no_block(g.revert_sync_batchnorm)],
    "make_parallel": [
        *parallel_already(lambda net: g.make_parallel(net, TWO), "make_parallel"),
        *bad(dense, TypeError, CONTEXTS, contexts=[None]),
        *bad_contexts(dense),
        *bad_bool(dense, "gather", "sync_bn", "reset_ctx"),
        *bad(dense, TypeError, "an int", batch_axis=[True, "a"]),
    ],
    "ParallelNet": [
        (
            lambda: dense().module,
            "a ParallelNet has no attribute 'module', and neither has its template, "
            "the attribute net (Dense)",
            AttributeError,
        ),
        (
            lambda: dense()[0],
            "the template of this ParallelNet, its attribute net, is a Dense, which "
            "has no items, expected a net like HybridSequential",
            TypeError,
        ),
    ],
    "ParallelNet.forward": [
        *bad_batch(forward),
        *wrong(
            forward,
            (None, "the inputs hold no array, expected at least one with rows"),
            (None, 2, "the inputs hold no array, expected at least one with rows"),
            (ARRAY[:2], ARRAY[:3], "have 2, 3 rows along axis 0, expected equal numb"),
            (np.ones((0, 3)), "the batch has 0 rows along axis 0, expected at least 1"),
        ),
        (
            partial(forward, [ARRAY, ARRAY.as_in_context(TWO[1])]),
            "a parallel net takes the whole batch and splits it, but got a list of "
            "shards, one on each of cpu(0), cpu(1)",
            TypeError,
        ),
        *wrong(
            of(partial(dense, batch_axis=3), "__call__"),
            (ARRAY, "batch_axis is 3, but an input has shape (4, 3)"),
        ),
    ],
    "ParallelNet.initialize": [*bad(initialize, TypeError, CONTEXTS, ctx=[5])],
    "ParallelNet.hybridize": "as in mxnet.gluon.Block",
    "ParallelNet.load_parameters": [
        *bad(load, TypeError, "a path", filename=[5]),
        *bad(partial(load, "a"), TypeError, CONTEXTS, ctx=[5]),
    ],
    "ParallelNet.save_parameters": [
        *bad(save, TypeError, "a path", filename=[None, 5]),
        (partial(save, "a\0b"), "filename is a str without NUL and lone surrogates"),
        *bad_bool(partial(save, "a"), "deduplicate"),
    ],
    "ParallelNet.export": [
        *bad(export, TypeError, "a path", path=[None]),
        *bad(partial(export, "a"), TypeError, "an int", epoch=["a", True]),
        *bad(partial(export, "a"), ValueError, "at least 0", epoch=[-1]),
        *bad_bool(partial(export, "a"), "remove_amp_cast"),
    ],
    "ParallelNet.summary": [
        (partial(summary, None), "the inputs hold no array, expected at least one")
    ],
    "ParallelCriterion": [
        (lambda: g.ParallelCriterion(3, dense()), "loss is a Block or function, but"),
        (lambda: g.ParallelCriterion(len, 3), "net is what make_parallel returns, but"),
        (criterion_of_another_net, "output is from another net than the criterion's"),
    ],
    "ParallelCriterion.forward": "a call, see ParallelCriterion",
    "ShardedOutput": [
        (
            partial(sharded_to, lambda y: y.asnumpy()),
            "ShardedOutput has no attribute 'asnumpy': give it to a ParallelCriterion",
            AttributeError,
        ),
        (partial(sharded_to, mx.gluon.loss.L2Loss()), SHARDED, AttributeError),
        (partial(sharded_to, hybridized_loss()), SHARDED, ValueError),
        (partial(sharded_to, mx.nd.relu), SHARDED, AssertionError),
    ],
    "allow_plain_loop": [*parallel_already(g.allow_plain_loop, "allow_plain_loop")],
    "Devices": [
        *bad(g.Devices, TypeError, CONTEXTS, contexts=[None]),
        *bad_contexts(g.Devices),
        *gpus_on_a_cpu_build(),
    ],
    "Devices.split": [
        *bad_batch(split),
        *bad(split, TypeError, "an NDArray or NumPy array", batch=[[1, 2], None]),
        *wrong(
            split,
            (ARRAY, 2, "batch_axis is 2, but batch has shape (4, 3)"),
            (
                ARRAY[:1],
                "batch has 1 row along axis 0, expected at least one for each of the 2 "
                "contexts; make_parallel takes any number, and participating names the",
            ),
        ),
        *bad(partial(split, ARRAY), TypeError, "an int", batch_axis=["0"]),
    ],
    "Devices.map_first": [
        (partial(map_first, 5), "function is a function, but got 5"),
        (partial(map_first, len, 5), "list 0 is a list with an element"),
        *wrong(
            map_first,
            (len, [1, 2], "a", "lists have lengths 1, 2, expected equal ones, at mos"),
            (len, "abc", "lists have lengths 3, expected equal ones, at most 2"),
        ),
    ],
    "Devices.close": "takes nothing",
    "Devices.map": [
        *(
            (partial(map_each, len, value), LIST)
            for value in (5, np.array(3), list, {"a": 1, "b": 2})
        ),
        (partial(map_each, None), "function is a function, but got None"),
        *wrong(
            map_each,
            (
                len,
                [1],
                "list 0 has 1 element, expected one for each of the 2 contexts; "
                "make_parallel takes batches with fewer rows than contexts",
            ),
            (len, "ab", "abc", "list 1 has 3 elements, expected one for each of the 2"),
        ),
    ],
    "participating": [
        *no_block(lambda net: participate(net, TWO)),
        (lambda: participate(layer(), None), f"contexts is {CONTEXTS}, but got None"),
        *bad_contexts(lambda contexts: participate(layer(), contexts)),
    ],
    "recover": [*bad_text(g.recover, "reason")],
    "set_timeout": [*bad_seconds(g.set_timeout, "seconds")],
    "Monitor": [
        *no_block(g.Monitor),
        (lambda: g.Monitor(layer(), 5), "trainer is a gluon.Trainer, but got 5"),
    ],
    "Monitor.data": [*bad(monitored, TypeError, "an iterable", batches=[5])],
    "Monitor.report": "takes nothing",
    "check_replicas": [*no_block(g.check_replicas)],
    "distributed": "a module, see below",
    "gluoncv": "a module; install takes nothing",
    "__version__": "a text",
    **dict.fromkeys(["available_contexts", "features", "get_timeout"], "takes nothing"),
    "keep_freed_memory": "takes nothing",
}
DISTRIBUTED = {
    "Trainer": [
        (partial(d.Trainer, None, "sgd"), "net is a gluon.Block, a ParameterDict or a"),
        (partial(d.Trainer, [], "sgd"), "net has no parameters, expected at least one"),
        *bad(trainer, ValueError, "positive", bucket_megabytes=[0]),
        *bad(trainer, TypeError, "positive", bucket_megabytes=["4"]),
        *bad(trainer, TypeError, OPTIMIZER, optimizer=[None, 5]),
        *bad(trainer, TypeError, "a dict or None", optimizer_params=[5]),
        (trainer_of_an_embedding, "is row_sparse, expected a dense one", TypeError),
    ],
    "Trainer.step": [
        *bad(step, TypeError, SAMPLES, batch_size=["4", None, [4]]),
        *bad(step, ValueError, SAMPLES, batch_size=[NAN, -1, True, INF]),
        *wrong(step, (0, "positive in at least one process, but got 0 in all")),
        *bad_bool(partial(step, 4), "ignore_stale_grad"),
    ],
    "Trainer.join": [*bad_seconds(of(trainer, "join"))],
    "ShardSampler": [
        *bad(partial(sampled, size=2), ValueError, "at least 0", rank=[-1]),
        *bad(partial(sampled, size=2), ValueError, "at most 1", rank=[2]),
        *bad(partial(sampled, rank=0), ValueError, "at least 1", size=[0]),
        *bad(partial(sampled, rank=0), ValueError, f"at most {INT}", size=[2**40]),
        *bad(sampled, ValueError, "at least 0", length=[-1], seed=[-1]),
        *bad(sampled, ValueError, f"at most {2**63 - 1}", length=[2**70]),
        *bad(sampled, TypeError, "an int", length=["8"]),
        (
            partial(sampled, batch_size=1, rank=0, size=2),
            "batch_size is at least one row for each of the 2 processes, but got 1",
        ),
        *bad_bool(sampled, "shuffle"),
    ],
    "ShardSampler.set_epoch": [
        *bad(sampled().set_epoch, ValueError, "at least 0", epoch=[-1]),
        *bad(sampled().set_epoch, TypeError, "an int", epoch=["1"]),
    ],
    "allreduce": [
        (partial(d.allreduce, "five"), "array holds numbers, but got the dtype <U4"),
        *(
            (partial(d.allreduce, value), f"array fits int64, but holds {value}")
            for value in (2**63, np.uint64(2**63 + 5))
        ),
        *bad_text(partial(d.allreduce, 5), "name"),
        *bad_seconds(partial(d.allreduce, 5)),
    ],
    "allgather": [*bad_text(partial(d.allgather, 5), "name")],
    "barrier": [*bad_seconds(d.barrier)],
    "broadcast": [
        *bad(partial(d.broadcast, 5), ValueError, "a rank below 1", root=[1]),
        *bad(partial(d.broadcast, 5), TypeError, "an int", root=[None]),
    ],
    "broadcast_parameters": [
        (lambda: d.broadcast_parameters(None), "net is a gluon.Block, a ParameterDict"),
        *bad(broadcast, ValueError, "a rank below 1", root=[7]),
        *bad_seconds(broadcast),
    ],
    "groups_of": [
        *bad(d.groups_of, ValueError, "at least 1", k=[0]),
        *bad(d.groups_of, TypeError, "an int", k=[True, 2.0]),
        *bad_contexts(partial(d.groups_of, 2)),
    ],
    "init": [*bad_seconds(d.init)],
    "join": [*bad_seconds(d.join)],
    **dict.fromkeys(["is_initialized", "local_rank", "local_size"], "takes nothing"),
    **dict.fromkeys(["rank", "shutdown", "size"], "takes nothing"),
}


def rows(table):
    for name, found in table.items():
        for number, row in enumerate(found if isinstance(found, list) else []):
            call, words, *error = row
            error = tuple(error) or (TypeError, ValueError, mx.MXNetError)
            yield pytest.param(call, words, error, id=f"{name}-{number}")


@pytest.mark.parametrize("call, words, errors", [*rows(ROWS), *rows(DISTRIBUTED)])
def test_refused_in_one_sentence(call, words, errors):
    with pytest.raises(errors) as caught:
        call()
    text = str(caught.value)
    assert words in text
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
    given = {"num_devices": np.int64(2), "epsilon": np.float32(1e-5)}
    assert norm(**given, scale=np.bool_(True)).num_devices == 2
    half = initialized(norm(in_channels=3, momentum=Fraction(1, 2)))
    with mx.autograd.train_mode():
        half(ARRAY).wait_to_read()
    assert (half.running_mean.data() == 0.5).asnumpy().all()
    sampled(np.int64(8), np.int32(4), rank=np.int64(0), size=1)
