"""A training whose ranks are killed again and again ends with the same bits."""

import hashlib
import os
import random
import signal
import time

import pytest
from support.mpi import finish, needs_mpi, start

pytestmark = [needs_mpi, pytest.mark.full, pytest.mark.timeout(1800)]

STEPS, KILLS = 300, 20
TRAIN = f"""
import json
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
    net.load_parameters(str(folder / f'{{first}}.params'))
    trainer.load_states(str(folder / f'{{first}}.states'))
(folder / f'pid{{rank}}').write_text(str(os.getpid()))
for step in range(first, {STEPS}):
    if step % 7 == 0 and step > first and rank == 0:
        net.save_parameters(str(folder / f'{{step}}.params'))
        trainer.save_states(str(folder / f'{{step}}.states'))
        (folder / 'new').write_text(str(step))
        os.replace(folder / 'new', latest)
    rng = np.random.default_rng([step, rank])
    x = nd.array(rng.normal(size=(3 + rank, 4)))
    with autograd.record():
        loss = (net(x) ** 2).sum()
    loss.backward()
    trainer.step(3 + rank)
    mx.nd.waitall()
    if rank == 0:
        print('step', flush=True)
gluon_syncbn.check_replicas(net)
if rank == 0:
    net.save_parameters(str(folder / 'end.params'))
print('done', flush=True)
"""


def train(folder, kill_after=None, random=None):
    """Train from the latest checkpoint; kill a rank after so many steps if given."""
    process = start(3, TRAIN, folder)
    if kill_after is not None:
        steps = 0
        for line in process.stdout:
            steps += line == "step\n"
            if steps == kill_after:
                break
        time.sleep(random.uniform(0, 0.02))  # somewhere in the next steps
        # All ranks take part in a step, so all have written their numbers.
        pid = (folder / f"pid{random.randrange(3)}").read_text()
        os.kill(int(pid), signal.SIGKILL)
    output = finish(process)
    is_done = process.returncode == 0 and output.count("done") == 3
    assert is_done == (kill_after is None), output[-4000:]


def test_killed_ranks_end_with_the_bits_of_an_undisturbed_run(tmp_path):
    numbers, folders = random.Random(0), [tmp_path / "killed", tmp_path / "undisturbed"]
    for folder in folders:
        folder.mkdir()
    for _ in range(KILLS):
        train(folders[0], numbers.randint(1, 20), numbers)
    train(folders[0])
    train(folders[1])
    killed, undisturbed = (
        hashlib.sha256((folder / "end.params").read_bytes()).hexdigest()
        for folder in folders
    )
    assert killed == undisturbed
