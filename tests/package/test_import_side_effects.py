"""Importing gluon_syncbn changes neither MXNet nor nets without its layers."""

from support.helpers import RESTORE_NUMPY_NAMES, output_of

PROGRAM = (
    RESTORE_NUMPY_NAMES
    + """
import os, signal
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

OWNERS = [
    *(gluon.Trainer, mx.optimizer.Updater, gluon.Block, gluon.HybridBlock),
    *(gluon.SymbolBlock, gluon.Parameter, gluon.ParameterDict, nn.BatchNorm),
    *(autograd._RecordingStateScope, autograd.Function, mx.nd.NDArray),
    *(autograd, mx.base, mx.random, mx.engine, gluon.contrib.nn, mx.contrib),
]

FUNCTIONS = "MXGetLastError MXAutogradBackwardEx MXInvokeCachedOpEx MXNDArrayFree"

def state():
    attributes = [{k: id(v) for k, v in vars(owner).items()} for owner in OWNERS]
    # ctypes adds an attribute to _LIB when a C function is first looked up.
    found = {k: id(getattr(mx.base._LIB, k)) for k in FUNCTIONS.split()}
    handlers = {n: str(signal.getsignal(n)) for n in signal.valid_signals()}
    threads = dict.fromkeys(os.listdir("/proc/self/task"), 1)
    return [*attributes, found, handlers, threads]

def check(before, after_what):
    names = [*(str(owner) for owner in OWNERS), "MXNet's library", "signals", "threads"]
    for name, old, new in zip(names, before, state()):
        changed = {k for k in {*old, *new} if old.get(k) != new.get(k)}
        assert not changed, f"{after_what} changes {changed} of {name}"

def train(norm=nn.BatchNorm):
    mx.random.seed(0)
    np.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    net.add(nn.Conv2D(4, 3, in_channels=3), norm(in_channels=4), nn.Dense(1))
    net.initialize()
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "adam")
    x = mx.nd.array(np.random.normal(size=(5, 3, 6, 6)))
    for _ in range(10):
        with autograd.record():
            loss = (net(x) ** 2).mean()
        loss.backward()
        trainer.step(1)
    mx.nd.waitall()
    values = [p.data().asnumpy().tobytes() for p in net.collect_params().values()]
    return b"".join(values).hex(), vars(trainer).keys()

expected = train()  # starts MXNet's threads
before = state()
import gluon_syncbn
check(before, "importing")
assert train() == expected
check(before, "training without our layers")
train(gluon_syncbn.SyncBatchNorm)
assert train() == expected, "training with our layers changes other nets"
"""
)


def test_nothing_changes_for_other_nets():
    output_of(PROGRAM)
