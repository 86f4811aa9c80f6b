"""Every public function refuses what it does not take, in one sentence.

The checks that functions share are tested with values of every kind, each argument of
a public function with one value, and what depends on several arguments by rows: a call,
and words of the error's text.
"""

import inspect
import re
from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import gluon_syncbn as g
from gluon_syncbn import distributed as d
from gluon_syncbn.common import arguments as checks
from gluon_syncbn.native.failures import check_timeout

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn
from support.helpers import cpus

TWO = cpus(2)
ONES = 1, 1, 1, 1
ARRAY = mx.nd.ones((4, 3))
NAN, INF, HUGE = float("nan"), float("inf"), 10**400
BOOL, INT = "True or False", "an int"
SECONDS = "a positive number of seconds, or inf for never"
CONTEXTS = "a list of mxnet.Context"
TEXT = "a str without NUL and lone surrogates"
INITIALIZER = "a str or mxnet.init.Initializer"
GROUP = 'None, "machine", "process", a list of ranks, or a list of such lists'
ERRORS = TypeError, ValueError, AttributeError, AssertionError, RuntimeError


# ---- the checks that functions share -------------------------------------------------

positive = partial(checks.check_real, expected="positive", holds=lambda v: v > 0)
seconds = lambda name, value: check_timeout(value, name)  # noqa: E731
CHECKS = [
    (checks.check_int, TypeError, INT, ["3", None, 1.5, True, [2], NAN]),
    (partial(checks.check_int, minimum=1), ValueError, "at least 1", [0, -HUGE]),
    (partial(checks.check_int, maximum=1), ValueError, "at most 1", [2, HUGE]),
    (checks.check_bool, TypeError, BOOL, ["no", None, 2]),
    (positive, TypeError, "positive", ["1", None, [1], np.array([3.0])]),
    (positive, ValueError, "positive", [0, -0.5, True, NAN, -INF, -HUGE]),
    (seconds, ValueError, SECONDS, [0, -1, True, "5", NAN, [1], -HUGE]),
    (checks.check_block, TypeError, "a gluon.Block", [None, 3, "net", abs, []]),
    (checks.check_callable, TypeError, "a function", [None, 5, "len"]),
    (checks.check_text, TypeError, "a str", [5, None]),
    (checks.check_text, ValueError, TEXT, ["\ud800", "a\0b"]),
    (checks.check_contexts, TypeError, CONTEXTS, [2, "cpu", None]),
]


@pytest.mark.parametrize(
    "check, error, expected, value",
    [(*row, value) for *row, values in CHECKS for value in values],
)
def test_shared_checks(check, error, expected, value):
    with pytest.raises(error) as caught:
        check("name", value)
    assert (
        str(caught.value) == f"name is {expected}, but got {checks.short_repr(value)}"
    )


def test_values_are_shown_in_one_short_line():
    text = checks.short_repr(np.ones((100, 100)))
    assert "\n" not in text and len(text) <= 200


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


def participate(net, contexts):
    with g.participating(net, contexts):
        pass


def monitored(batches):
    with g.Monitor(layer()) as monitor:
        monitor.data(batches)


recompute = g.recompute_statistics
norm, forward, devices = g.SyncBatchNorm, of(dense, "__call__"), partial(g.Devices, TWO)
split, map_each, map_first = (of(devices, m) for m in ("split", "map", "map_first"))

# Objects for calls of methods, good values of arguments, and how generators are called.
OBJECTS = {
    "SyncBatchNorm": layer,
    "Devices": devices,
    "distributed.Trainer": trainer,
    "distributed.ShardSampler": sampled,
}
GOOD = {
    "activation": "leaky_relu",
    "batch": ARRAY,
    "batch_size": 4,
    "batches": [ARRAY],
    "contexts": TWO,
}
GOOD.update(ctx=TWO, function=len, k=1, length=8, net=layer(), optimizer="sgd")
CALLED = {"participating": participate, "Monitor.data": monitored}

BOOLS = "center frozen ignore_stale_grad reset_ctx"
BOOLS += " scale shuffle sync_bn unbiased_running_var use_global_stats"
INITIALIZERS = "beta gamma running_mean running_variance"
# Names of arguments with a value that is refused, and what is expected instead.
REFUSED = [
    (BOOLS, 2, "True or False"),
    (INITIALIZERS.replace(" ", "_initializer ") + "_initializer", 5, INITIALIZER),
    ("activation", ["relu"], "None, 'identity', 'relu' or 'leaky_relu'"),
    ("axis batch_axis in_channels", "3", "an int"),
    ("batch", [1, 2], "an NDArray or NumPy array"),
    ("distributed.Trainer.step.batch_size", -1, "a finite number of samples, not neg"),
    ("batches", 5, "an iterable"),
    ("contexts ctx", "cpu", CONTEXTS),
    ("epoch seed", -1, "at least 0"),
    ("epsilon", -1e-5, "a finite number, not negative"),
    ("function", 5, "a function"),
    ("group", [0, mx.cpu()], GROUP),
    ("batch_size k length steps", 0, "at least 1"),
    ("momentum", 1.5, "between 0 and 1"),
    ("net", 3, "a gluon.Block"),
    ("nonfinite", "ignore", "'propagate', 'skip' or 'raise'"),
    ("num_devices", "2", "an int or None"),
    ("optimizer", 5, "a name or mxnet.optimizer.Optimizer"),
    ("optimizer_params", 5, "a dict or None"),
    ("reason", 5, "a str"),
    ("root", 1, "a rank below 1"),
    ("seconds timeout", 0, SECONDS),
    ("slope", 0, "a positive number"),
]
ARGUMENTS = {name: row for names, *row in REFUSED for name in names.split()}
# Those that are handed on to Gluon, and those whose sentences are in ROWS.
ELSEWHERE = {*"kwargs lists self make_parallel.ctx".split()}
# Made or called by MXNet and other functions of ours, or with arrays, as in ROWS.
MADE = {"SyncBatchNorm.hybrid_forward", "SyncBatchNorm.forward"}


def public(module, prefix=""):
    """Public functions, and the methods that public classes define, by their names."""
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, type):
            for method, function in vars(value).items():
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{prefix}{name}.{method}", function
        if callable(value):
            yield prefix + name, value


PUBLIC = {**dict(public(g)), **dict(public(d, "distributed."))}


def checked():
    """Every argument of every public function, with the function's name."""
    for name in sorted(PUBLIC.keys() - MADE):
        for argument in inspect.signature(PUBLIC[name]).parameters:
            if not {argument, f"{name}.{argument}"} & ELSEWHERE:
                yield name, argument


@pytest.mark.parametrize("name, argument", checked())
def test_each_argument_is_checked(name, argument):
    value, expected = ARGUMENTS.get(f"{name}.{argument}") or ARGUMENTS[argument]
    options = {
        a: GOOD[a] for a in inspect.signature(PUBLIC[name]).parameters if a in GOOD
    }
    options[argument] = value
    made = OBJECTS.get(name.rpartition(".")[0])
    call = CALLED.get(name) or partial(PUBLIC[name], *([made()] if made else []))
    words = re.escape(f"{argument} is {expected}") + ".*, but got "
    with pytest.raises((TypeError, ValueError), match=words):
        call(**options)


# ---- other sentences -----------------------------------------------------------------


def with_devices():
    net = nn.Dense(1)
    net.devices = 2
    return net


def trainer_of_an_embedding():
    d.Trainer(initialized(nn.Embedding(2, 2, sparse_grad=True)), "sgd")


call, parallel = of(layer, "__call__"), g.make_parallel
list_of_text = partial(map_each, len, {"a": 1, "b": 2})
own_axis = of(partial(dense, batch_axis=3), "__call__")
two_shards = [ARRAY, ARRAY.as_in_context(TWO[1])]
convert = g.convert_sync_batchnorm
b = nn.BatchNorm(prefix="b_")
bad_momentum = nn.BatchNorm(momentum="0.9", prefix="b_")
ROWS = [
    # SyncBatchNorm
    (f"in_channels is at most {2**31 - 1}, but got", partial(norm, 2**31)),
    ("num_devices is at least 1, but got 0", partial(norm, num_devices=0)),
    ("axis is at least -5, but got -6", partial(norm, axis=-6)),
    ("axis is at most 4, but got 5", partial(norm, axis=5)),
    (f"group is {GROUP}, but got array(", partial(norm, group=np.array([0, 1]))),
    (f"group is {GROUP}, but got [[cpu(0)]", partial(norm, group=[TWO[:1], TWO[1:]])),
    ("group holds an empty list: [[], [0]]", partial(norm, group=[[], [0]])),
    ("group names 1 2 times", partial(norm, group=[[0, 1], [1]])),
    ("group names the rank -1, expected 0 or more", partial(norm, group=[-1])),
    (
        "slope is for 'leaky_relu', but got 0.1 with activation='relu'",
        partial(norm, activation="relu", slope=0.1),
    ),
    ("but got 'elu': an ELU is a layer of its own", partial(norm, activation="elu")),
    ("an ELU is a layer of its own", partial(norm, activation=nn.ELU())),
    ("momentum is between 0 and 1, but got None: for", partial(norm, momentum=None)),
    ("data is an NDArray or Symbol, but got [ [[1. 1. 1", partial(call, [ARRAY])),
    ("data has shape (2, 4), expected 3 channels", partial(call, mx.nd.ones((2, 4)))),
    ("data has 2 to 5 dimensions, but got 6", partial(call, mx.nd.ones((2, 3, *ONES)))),
    ("momentum of b is between 0 and 1", partial(convert, bad_momentum)),
    ("but got None: for the average", partial(convert, nn.BatchNorm(momentum=None))),
    # parallel nets
    (f"contexts is {CONTEXTS}, but got 'cpu'", partial(dense, "cpu")),
    (
        "net is parallel already, over cpu(0), cpu(1), and needs no make_p",
        lambda: parallel(dense(), TWO[:1]),
    ),
    ("needs no allow_plain_loop", lambda: g.allow_plain_loop(dense())),
    (
        "net is one that make_parallel was called with, but",
        lambda: g.revert_parallel(layer()),
    ),
    (
        "net has an attribute 'devices' of its own",
        lambda: parallel(with_devices(), TWO),
    ),
    ("the inputs hold no array, expected at least one", partial(forward, None, 2)),
    ("the inputs hold no array, expected", partial(of(dense, "summary"), None)),
    ("have 2, 3 rows along axis 0", partial(forward, ARRAY[:2], ARRAY[:3])),
    ("the batch has 0 rows along axis 0", partial(forward, np.ones((0, 3)))),
    ("takes the whole batch and splits it, but got", partial(forward, two_shards)),
    ("batch_axis is 3, but an input has shape (4, 3)", partial(own_axis, ARRAY)),
    # Devices
    (f"contexts is {CONTEXTS}, but it holds 0", partial(g.Devices, [0])),
    ("contexts is empty, expected at least one context", partial(g.Devices, [])),
    ("contexts names cpu(0) 2 times", partial(g.Devices, cpus(1) * 2)),
    ("the dtype complex128", partial(split, np.ones((4, 3), "complex128"))),
    ("batch is a dense array, but got a csr one", partial(split, ARRAY.tostype("csr"))),
    ("batch_axis is 2, but batch has shape (4, 3)", partial(split, ARRAY, 2)),
    ("expected at least one for each of the 2 contexts; ", partial(split, ARRAY[:1])),
    ("list 0 is a list with an element", partial(map_first, len, 5)),
    ("lists have lengths 1, 2, expected equal", partial(map_first, len, [1], "ab")),
    ("lists have lengths 3, expected equal ones, at", partial(map_first, len, "abc")),
    ("list 0 is a list with an element for each context, but got", list_of_text),
    ("list 0 has 1 element, expected one for each of", partial(map_each, len, [1])),
    # distributed
    ("net has no parameters, expected at least one", partial(d.Trainer, [], "sgd")),
    ("is row_sparse, expected a dense one", trainer_of_an_embedding),
    ("positive in at least one process, but got 0", partial(of(trainer, "step"), 0)),
    # recompute_statistics
    ("batches is an iterable of batches, but", partial(recompute, layer(), ARRAY)),
    ("b is not initialized. Call net.initialize() be", partial(recompute, b, [ARRAY])),
]
if not mx.runtime.Features().is_enabled("CUDA"):
    gpu = "contexts names gpu(1), but this MXNet was built for CPUs alone: expected"
    ROWS.append((gpu, partial(dense, [mx.gpu(1), mx.gpu(0)])))


@pytest.mark.parametrize("words, call", ROWS)
def test_refused_in_one_sentence(words, call):
    with pytest.raises(ERRORS) as caught:
        call()
    text = str(caught.value)
    assert words in text
    if not isinstance(caught.value, mx.MXNetError):  # MXNet adds a stack trace
        assert "\n" not in text


@pytest.mark.parametrize("length", range(1, 14))
def test_samplers_of_all_ranks_have_equally_many_batches(length, monkeypatch):
    """Which hold all samples, and as few twice as give each rank a row."""
    shards = []
    for rank in range(3):
        world = partial(SimpleNamespace, rank=rank, size=3)
        monkeypatch.setattr("gluon_syncbn.distributed.sampler.world", world)
        sampler = sampled(length, 4)
        shards.append([*sampler])
        assert len(sampler) == len(shards[rank]) == len(shards[0])
        assert all(shards[rank])
        sampler.set_epoch(0)
        assert [*sampler] == shards[rank]
    samples = sum(sum(shards, []), [])
    assert {*samples} == {*range(length)}
    assert len(samples) == length + max(0, 3 - (length % 4 or 4))


def test_what_is_meant_is_taken():
    given = {"num_devices": np.int64(2), "epsilon": np.float32(1e-5)}
    assert norm(**given, scale=np.bool_(True)).num_devices == 2
    half = initialized(norm(in_channels=3, momentum=Fraction(1, 2)))
    with mx.autograd.train_mode():
        half(ARRAY).wait_to_read()
    assert (half.running_mean.data() == 0.5).asnumpy().all()
    assert len(sampled(np.int64(8), np.int32(4))) == 2
