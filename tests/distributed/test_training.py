"""Two processes train like one; MPI or MXNet's kvstore sums their gradients."""

import itertools
import os
import random
import re
import signal
import time

from gluon_syncbn import SyncBatchNorm

import pytest
from mxnet.gluon import Trainer, nn
from support.blocks import gluon_1_only
from support.helpers import ROOT, differentiate, queue_hidden_write, ready
from support.mpi import SECONDS, finish, needs_mpi, run_ranks, start
from support.nd import nd

pytestmark = pytest.mark.timeout(2 * SECONDS)

# kvstore.md's program "servers" starts the kvstore's scheduler and server.
PAGE = (ROOT / "docs" / "guides" / "kvstore.md").read_text(encoding="utf-8")
BLOCK = r"<!-- tested: (\w+) -->\n\n```python\n(.*?)```"
PROGRAMS = dict(re.findall(BLOCK, PAGE, re.DOTALL))

TRAIN = """
import warnings
from support.helpers import assert_all_near, copy_parameters, values
warnings.simplefilter('error', UserWarning)

rng = np.random.default_rng(0)
data, labels = rng.normal(1, 2, (13, 3, 6, 6)), rng.normal(size=(13, 5))
SGD = 'sgd', dict(learning_rate=0.03, momentum=0.5, wd=1e-3)

def make(norm, seed, contexts=None):
    mx.random.seed(seed)
    net = nn.HybridSequential()
    for channels, inputs in (4, 3), (6, 4):
        net.add(nn.Conv2D(channels, 3, padding=1, in_channels=inputs))
        net.add(norm(in_channels=channels, momentum=0.5), nn.Activation('relu'))
    net.add(nn.Dense(5, in_units=6 * 36))
    net.cast('float64')
    if contexts:
        gluon_syncbn.make_parallel(net, contexts)
    net.initialize(mx.init.Xavier())
    return net

def train(net, trainer, batches, sizes):
    losses = []
    for rows, size in zip(batches, sizes):
        x, y = (nd.array(v[rows], dtype='float64') for v in (data, labels))
        with autograd.record():
            loss = ((net(x) - y) ** 2).sum()
        loss.backward()
        trainer.step(size)
        losses.append(loss.asnumpy().item())
    mx.nd.waitall()  # MXNet may hang if a kvstore ends with pending work
    return np.array(losses)

orders = [np.resize(rng.permutation(13), 14) for epoch in range(3)]
whole = [order[i : i + 3].tolist() for order in orders for i in range(0, 14, 3)]
batches = [rows[rank::2] for rows in whole]  # uneven
for kind in sys.argv[1:]:
    is_ours = kind == 'distributed'
    contexts = [mx.cpu(0), mx.cpu(1)][: 2 - rank]
    net = make(SyncBatchNorm, 7 + rank * is_ours, contexts)
    if is_ours:
        trainer = distributed.Trainer(net, *SGD)  # copies rank 0's parameters
    else:
        options = dict(kvstore='dist_sync', update_on_kvstore=kind == 'servers')
        trainer = mx.gluon.Trainer(net.collect_params(), *SGD, **options)
    single = make(nn.BatchNorm, 7)
    copy_parameters(net, single)
    one = mx.gluon.Trainer(single.collect_params(), *SGD)
    # A kvstore's server keeps the batch size of the first step.
    sizes = list(map(len, whole)) if is_ours else [3] * len(whole)
    own_sizes = map(len, batches) if is_ours else sizes  # our Trainer sums sizes
    losses = MPI.COMM_WORLD.allreduce(train(net, trainer, batches, own_sizes))
    expected = [train(single, one, whole, sizes), *values(single)]
    # Each step adds rounding errors. The kvstore's server sums in float32.
    limits = 'float64' if is_ours else 'float32', len(whole) * 13 * 36
    assert_all_near([losses, *values(net)], expected, *limits)
    gluon_syncbn.check_replicas(net)
"""


@needs_mpi
@pytest.mark.parametrize(
    "kinds",
    [("distributed", "workers"), pytest.param(("servers",), marks=pytest.mark.full)],
    ids="-".join,
)
def test_training_equals_one_process(kinds):
    """MXNet aborts a worker that has not deleted its kvstore when Python ends."""
    run_ranks(2, PROGRAMS["servers"] + TRAIN, *kinds)


RESUMED = """
from pathlib import Path

faulthandler.dump_traceback_later(600, exit=True)
folder = Path(sys.argv[1])
net = nn.HybridSequential()
net.add(nn.Dense(6, in_units=4), SyncBatchNorm(in_channels=6), nn.Dense(2, in_units=6))
gluon_syncbn.make_parallel(net, [mx.cpu(0), mx.cpu(1)][: 2 - rank % 2])
mx.random.seed(3)
net.initialize(mx.init.Xavier())
trainer = distributed.Trainer(net, 'adam')
latest, first = folder / 'latest', 0
if latest.exists():
    first = int(latest.read_text())
    net.load_parameters(str(folder / f'{first}.params'))
    trainer.load_states(str(folder / f'{first}.states'))
(folder / f'pid{rank}').write_text(str(os.getpid()))
for step in range(first, int(sys.argv[2])):
    if step % 7 == 0 and step > first and rank == 0:
        net.save_parameters(str(folder / f'{step}.params'))
        trainer.save_states(str(folder / f'{step}.states'))
        (folder / 'new').write_text(str(step))
        os.replace(folder / 'new', latest)
    rng = np.random.default_rng([step, rank])
    x = nd.array(rng.normal(size=(3 + rank, 4)))
    differentiate(lambda: (net(x) ** 2).sum())
    trainer.step(3 + rank)
    mx.nd.waitall()
    if rank == 0:
        print('step', flush=True)
gluon_syncbn.check_replicas(net)
if rank == 0:
    net.save_parameters(str(folder / 'end.params'))
print('done', flush=True)
"""


def resume(folder, steps, kill_after=None, random=None):
    """Train from the latest checkpoint; kill a rank after so many steps if given."""
    process = start(3, RESUMED, folder, steps)
    if kill_after is not None:
        lines = (line for line in process.stdout if line == "step\n")
        next(itertools.islice(lines, kill_after - 1, None))
        time.sleep(random.uniform(0, 0.02))  # somewhere in the next steps
        # All ranks take part in a step, so all have written their numbers.
        pid = (folder / f"pid{random.randrange(3)}").read_text()
        os.kill(int(pid), signal.SIGKILL)
    output = finish(process)
    is_done = process.returncode == 0 and output.count("done") == 3
    assert is_done == (kill_after is None), output[-4000:]
    if is_done:
        return (folder / "end.params").read_bytes()


MANY = pytest.param(300, 20, marks=[pytest.mark.full, pytest.mark.timeout(1800)])


@needs_mpi
@pytest.mark.parametrize("steps, kills", [(24, 1), MANY])
def test_killed_ranks_end_with_the_bits_of_an_undisturbed_run(steps, kills, tmp_path):
    numbers, folders = random.Random(0), [tmp_path / "killed", tmp_path / "undisturbed"]
    for folder in folders:
        folder.mkdir()
    for _ in range(kills):
        resume(folders[0], steps, numbers.randint(1, 20), numbers)
    killed, undisturbed = (resume(folder, steps) for folder in folders)
    assert killed == undisturbed


@needs_mpi
@gluon_1_only("the page has a program for Gluon 1")
def test_the_program_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_ranks(2, PROGRAMS["servers"] + PROGRAMS["kvstore"], init="")
    assert (tmp_path / "net.params").exists()


def test_kvstore_workers_without_mpirun_get_a_warning(monkeypatch):
    """The warning names the first layer whose `group` includes other processes."""
    workers_of = "gluon_syncbn.mxnet_private.trainers.workers_of"
    monkeypatch.setattr(workers_of, lambda trainer: 2)
    net = nn.HybridSequential()
    net.add(SyncBatchNorm(group="process"), SyncBatchNorm())
    trainer = Trainer(ready(net).collect_params(), "sgd")
    differentiate(net, nd.ones((2, 3)))
    layer = net[1]._sync.name
    with pytest.warns(UserWarning, match=f"2 workers.*'{layer}'.*mpirun"):
        trainer.step(2)


def test_a_step_waits_for_the_parameters_that_a_kvstore_copies(monkeypatch):
    """Otherwise MXNet may send the first gradients to the servers before them."""
    workers_of = "gluon_syncbn.mxnet_private.trainers.workers_of"
    monkeypatch.setattr(workers_of, lambda trainer: 2)
    layer = SyncBatchNorm(in_channels=1, group="process")
    layer.initialize()
    trainer = Trainer(layer.collect_params(), "sgd")
    differentiate(layer, nd.ones((2, 1)))
    copy = nd.zeros((1,))
    monkeypatch.setattr(Trainer, "_init_params", lambda _: queue_hidden_write(copy))
    trainer._init_params()
    assert copy.asnumpy() == 2  # MXNet does not know of the write, so this never waits
