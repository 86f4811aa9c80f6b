"""MXNet's kvstore sums gradients over processes, and layers synchronize over MPI.

A scheduler, a server and two workers run here, as MXNet's tools/launch.py starts them.
"""

import os
import re
import socket
import subprocess
import sys
from contextlib import contextmanager

from gluon_syncbn import SyncBatchNorm

import pytest
from mxnet.gluon import Trainer, nn
from support.blocks import gluon_1_only
from support.helpers import ROOT, differentiate
from support.mpi import SECONDS, needs_mpi, run_ranks
from support.nd import nd

pytestmark = pytest.mark.timeout(2 * SECONDS)

# All of a scheduler's and a server's program: MXNet's import runs them.
BEGIN = f"""
import faulthandler
faulthandler.dump_traceback_later({SECONDS}, exit=True)
import gluon_syncbn
"""

TRAIN = """
import sys
import gluon_syncbn
import mxnet as mx, numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.blocks import name_scope, prefixed
from support.nd import nd

ROWS, STEPS = 16, 3

def train(norm, mine=slice(0, ROWS), contexts=1, **options):
    '''The parameters after steps with some rows of each batch, and their copies.'''
    contexts = [mx.cpu(i) for i in range(contexts)]
    mx.random.seed(3)
    net = nn.HybridSequential(**prefixed('net_'))
    with name_scope(net):
        for channels, inputs in (8, 3), (8, 8):
            net.add(nn.Conv2D(channels, 3, padding=1, in_channels=inputs))
            net.add(norm(in_channels=channels), nn.Activation('relu'))
        net.add(nn.Dense(5, in_units=8 * 36))
    net.initialize(mx.init.Xavier())  # on one context, whose seed it has
    net(nd.ones((1, 3, 6, 6)))
    net.cast('float64')
    if len(contexts) > 1:
        net = gluon_syncbn.make_parallel(net, contexts, reset_ctx=True)
    settings = {'learning_rate': 0.05, 'momentum': 0.9, 'wd': 1e-3}
    trainer = gluon.Trainer(net.collect_params(), 'sgd', settings, **options)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        x = rng.normal(1, 2, (ROWS, 3, 6, 6))[mine]
        y = rng.integers(0, 5, ROWS)[mine]
        with autograd.record():
            loss = loss_of(net(nd.array(x, dtype='float64')), nd.array(y)).sum()
        loss.backward()
        trainer.step(ROWS)
    mx.nd.waitall()  # MXNet may hang where a kvstore ends with work in flight
    parameters = net.collect_params().values()
    return [[data.asnumpy() for data in p.list_data()] for p in parameters]
"""


@contextmanager
def worker_variables():
    """Start a scheduler and a server for two workers; both have to end after them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "2",
    }
    others = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN],
            env={**os.environ, **variables, "DMLC_ROLE": role},
        )
        for role in ("scheduler", "server")
    ]
    try:
        yield {**variables, "DMLC_ROLE": "worker"}
        assert [process.wait(SECONDS) for process in others] == [0, 0]
    finally:
        for process in others:
            process.kill()
            process.wait()


# Servers or workers update.
@needs_mpi
@pytest.mark.parametrize(
    "on_kvstore", [pytest.param(True, marks=pytest.mark.full), False]
)
def test_training_equals_that_of_one_process(on_kvstore):
    """Each worker ends with status 0, although a net lives as long as the program.

    ps-lite aborts a process whose kvstore lives longer than the interpreter.
    """
    program = f"""
import warnings
from support.helpers import assert_all_near
warnings.simplefilter('error', UserWarning)
mine = [slice(0, 11), slice(11, ROWS)][rank]
options = dict(kvstore='dist_sync', update_on_kvstore={on_kvstore})
found = train(gluon_syncbn.SyncBatchNorm, mine, 2, **options)
right = train(nn.BatchNorm)
assert len(found) == len(right) == 14
assert_same_bits(*sum(found, []))
for copies, (expected,) in zip(found, right):  # servers sum in float32
    assert_all_near(copies, [expected] * 2, 'float32', ROWS * 36)
"""
    with worker_variables() as variables:
        run_ranks(2, TRAIN + program, **variables)


@needs_mpi
@gluon_1_only("the page has programs for Gluon 1")
def test_the_programs_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "guides" / "kvstore.md").read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- tested: (\w+) -->\n\n```python\n(.*?)```", page, re.S)
    run_ranks(2, dict(blocks)["servers"] + dict(blocks)["kvstore"], init="")
    assert (tmp_path / "net.params").exists()


def test_workers_that_no_mpirun_connected_are_warned(monkeypatch):
    """The warning names the first layer that is not alone on purpose."""
    workers_of = "gluon_syncbn.mxnet_private.trainers.workers_of"
    monkeypatch.setattr(workers_of, lambda trainer: 2)
    net = nn.HybridSequential()
    net.add(SyncBatchNorm(group="process"), SyncBatchNorm())
    net.initialize()
    trainer = Trainer(net.collect_params(), "sgd")
    differentiate(net, nd.ones((2, 3)))
    layer = net[1]._sync.name
    with pytest.warns(UserWarning, match=f"2 workers.*'{layer}'.*mpirun"):
        trainer.step(2)
