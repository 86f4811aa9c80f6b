"""Every public function raises a short error that names a wrong argument."""

import inspect
from fractions import Fraction
from functools import partial

import gluon_syncbn as g
from gluon_syncbn import distributed as d

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn
from support.helpers import cpus, ready
from support.nets import Net

X, ODD, TWO = mx.nd.ones((4, 3)), ["3", [2], None, float("nan"), -(10**400)], cpus(2)
norm, convert, parallel = g.SyncBatchNorm, g.convert_sync_batchnorm, g.make_parallel
layer, b = ready(norm(in_channels=3)), nn.BatchNorm(prefix="b_")
dense, devices = ready(parallel(nn.Dense(1, in_units=3), TWO)), g.Devices(TWO)

DATA = mx.sym.var("data")
NODE = mx.sym.BatchNorm(DATA, name="bn")


def trained(name, x, dtype_of_gamma="float32", **options):
    new = ready(norm(in_channels=3, prefix=f"{name}_", **options))
    new.gamma.cast(dtype_of_gamma)
    with mx.autograd.train_mode():
        new(x).wait_to_read()


NETS = "Monitor allow_plain_loop check_replicas revert_parallel revert_sync_batchnorm"
# Wrong values of arguments.
BOOLS = dict.fromkeys("center scale use_global_stats unbiased_running_var".split(), 2)
KINDS = "beta", "gamma", "running_mean", "running_variance"
SETTINGS = {"num_devices": "2", "timeout": 0, "group": [0]}
SETTINGS.update(unbiased_running_var=2, nonfinite="ignore")
LAYER = {**BOOLS, **{f"{kind}_initializer": 5 for kind in KINDS}, **SETTINGS}
LAYER.update(in_channels="3", momentum=1.5, epsilon=-1e-5, axis="3", slope=0)
FLAGS = {"sync_bn": 2, "batch_axis": "0", "reset_ctx": 2, "nonfinite": "ignore"}
TABLE = [  # a function, right arguments that its calls need, wrong arguments
    *((getattr(g, name), {}, {"net": 3}) for name in NETS.split()),
    (norm, {}, {**LAYER, "activation": ["relu"]}),
    (convert, {"net": b}, {"net": 3, **SETTINGS}),
    (parallel, {"net": b, "ctx": TWO}, {"net": 3, "ctx": TWO * 2, **FLAGS}),
    (g.recompute_statistics, {"net": b, "batches": [X]}, {"net": 3, "batches": 5}),
    (partial(g.recompute_statistics, layer, [X]), {}, {"steps": 0}),
    (g.freeze_statistics, {"net": b}, {"net": 3, "frozen": 2}),
    (g.recover, {}, {"reason": 3}),
    (g.set_timeout, {}, {"seconds": 0}),
    (g.Devices, {}, {"contexts": "cpu"}),
    (devices.split, {"batch": X}, {"batch": [1, 2], "batch_axis": "0"}),
    (devices.map, {}, {"function": 5}),
    (d.Trainer, {"net": b, "optimizer": "sgd"}, {"net": 3, "optimizer": 5}),
    (partial(d.Trainer, layer, "sgd"), {}, {"optimizer_params": 5}),
    (d.Trainer(layer, "sgd").step, {}, {"batch_size": -1}),
    (partial(d.Trainer(layer, "sgd").step, 4), {}, {"ignore_stale_grad": 2}),
    (d.broadcast_parameters, {"net": layer}, {"net": 3, "root": 1, "timeout": 0}),
    (d.init, {}, {"timeout": 0}),
]
WRONG_CALLS = {  # a key lists facts that the error of its call must name
    "axis -5 -6": lambda: norm(axis=-6),
    "num_features in_channels.": lambda: norm(num_features=2),
    "ndev num_devices.": lambda: norm(ndev=2),
    "eps epsilon.": lambda: norm(eps=1e-3),
    "affine center scale.": lambda: norm(affine=False),
    "devices ctx.": lambda: parallel(nn.Dense(1), devices=TWO),
    "device ctx.": lambda: parallel(nn.Dense(1), device=TWO),
    "sync_bm net, ctx, sync_bn": lambda: parallel(nn.Dense(1), TWO, sync_bm=True),
    "process_group group.": lambda: convert(b, process_group=None),
    "time_out net, timeout": lambda: convert(b, time_out=2),
    "num_features arguments net, timeout": lambda: convert(b, num_features=2),
    "ctx [mx.cpu(0), mx.cpu(1)] 2": lambda: parallel(nn.Dense(1), 2),
    "slope 0.1 'relu'": lambda: norm(activation="relu", slope=0.1),
    "b '0.9'": lambda: convert(nn.BatchNorm(momentum="0.9", prefix="b_")),
    "data NDArray": lambda: layer([X]),
    "(2, 6) 3 channels": lambda: layer(X.reshape((2, 6))),
    "net cpu(0), cpu(1)": lambda: parallel(dense, TWO[:1]),
    "net allow_plain_loop": lambda: g.allow_plain_loop(dense),
    "no array": lambda: dense(None, 2),
    "2 3 axis 0": lambda: dense(X[:2], X[:3]),
    "whole batch cpu(1)": lambda: dense([X, X.as_in_context(TWO[1])]),
    "batch_axis 3 (4, 3)": lambda: parallel(nn.Dense(1), TWO, batch_axis=3)(X),
    "complex128": lambda: devices.split(np.ones((4, 3), "complex128")),
    "batch csr": lambda: devices.split(X.tostype("csr")),
    "1 row 2 contexts": lambda: devices.split(X[:1]),
    "list 0 'a'": lambda: devices.map(len, {"a": 1, "b": 2}),
    "row_sparse": lambda: d.Trainer(ready(nn.Embedding(2, 2, sparse_grad=True)), "sgd"),
    "batch_size 0": lambda: d.Trainer(layer, "sgd").step(0),
    "batches (4, 3) DataLoader [x]": lambda: g.recompute_statistics(layer, X),
    "initialize()": lambda: g.recompute_statistics(b, [X]),
    "mask NDArray [[1, 0]]": lambda: layer(X, [[1, 0]]),
    "mask NDArray Symbol": lambda: layer(X, mx.sym.var("mask")),
    "mask (2, 4) (2, 3)": lambda: layer(mx.nd.ones((2, 3, 4)), X[:2]),
    "'wide' axis 4 2": lambda: trained("wide", X, axis=4),
    "'narrow' axis -5 2": lambda: trained("narrow", X, axis=-5),
    "'cast' float32 or float64": lambda: trained("cast", X, dtype_of_gamma="float16"),
    "'flat' 2 5 1": lambda: trained("flat", X[0], axis=0),
    "'int' int32": lambda: trained("int", X.astype("int32")),
    "bn initialize": lambda: convert(mx.gluon.SymbolBlock(NODE, DATA)),
    "batch_axis 0 1": lambda: parallel(dense, TWO, batch_axis=1),
    "cpu(0), cpu(1) cpu(2)": lambda: parallel(Net(dense), cpus(3)),
}


def assert_names(call, *facts):
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text or isinstance(caught.value, mx.MXNetError)  # has a trace
    assert all(fact in text for fact in facts) and len(text) < 400, text


@pytest.mark.parametrize("function, right, wrong", TABLE)
def test_each_argument_is_checked(function, right, wrong):
    for name, value in wrong.items():
        for bad in [value, *(ODD if name in ("in_channels", "frozen") else [])]:
            assert_names(partial(function, **{**right, name: bad}), name)


def test_the_table_has_the_name_of_every_public_argument():
    tested = {name for *_, wrong in TABLE for name in wrong}
    public = [getattr(module, name) for module in (g, d) for name in module.__all__]
    for function in filter(callable, public):
        arguments = inspect.signature(function).parameters.keys() - {"kwargs"}
        assert arguments <= tested, function


@pytest.mark.parametrize("facts", WRONG_CALLS)
def test_the_error_of_a_wrong_call_names_facts(facts):
    assert_names(WRONG_CALLS[facts], *facts.split(" "))


def test_equal_values_of_other_types_are_accepted():
    options = {"num_devices": np.int64(2), "scale": np.bool_(True), "in_channels": 3}
    assert norm(**options, momentum=Fraction(1, 2)).num_devices == 2
