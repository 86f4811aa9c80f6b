"""Groups, steps and copies of several processes under mpirun; shares of a data set.

Each program runs on every rank and asserts there.
"""

from functools import partial
from types import SimpleNamespace

from gluon_syncbn.distributed import ShardSampler

import pytest
from support.mpi import in_turns, needs_mpi, run_ranks

pytestmark = [needs_mpi, pytest.mark.timeout(150)]


PROGRAMS = {
    # A layer of a group has the group's mean and variance.
    "groups": """
def running_mean(group, contexts=1):
    contexts = [mx.cpu(i) for i in range(contexts)]
    layer = SyncBatchNorm(in_channels=1, momentum=0, group=group)
    layer.initialize(ctx=contexts)
    # Before map, which would tell the other ranks of an error.
    gluon_syncbn.layer.synchronization.ranks_of(layer._sync.settings.group, layer.name)
    devices = Devices(contexts)
    with autograd.train_mode():
        xs = [nd.full((2, 1), 10 * rank + i, ctx=c) for i, c in enumerate(contexts)]
        for y in devices.map(layer, xs):
            y.wait_to_read()
    return [v.asnumpy().item() for v in layer.running_mean.list_data()]

assert distributed.groups_of(2) == [[0, 1], [2]]
assert running_mean(None) == [10]
assert running_mean('machine') == [10]
assert running_mean('process') == [10 * rank]
assert running_mean(distributed.groups_of(2)) == [[5], [5], [20]][rank]
assert running_mean([[0, 2], [1]]) == [[10], [10], [10]][rank]
if rank != 1:
    assert running_mean([2, 0], 2) == [10.5, 10.5]
else:
    text = error_of(running_mean, [0, 2])
    assert '[0, 2]' in text and 'rank 1' in text, text
text = error_of(running_mean, [0, 7])
assert 'group' in text and '7' in text and '3' in text, text
""",
    # MPI cannot sum float16, so the trainer has to. Each rank has several contexts.
    "steps and copies": """
from support.helpers import write_from_within
assert (distributed.local_rank(), distributed.local_size()) == (rank, 3)
distributed.init()
weight = mx.gluon.Parameter('weight', shape=(2, 3), dtype='float16')
contexts = [mx.cpu(0), mx.cpu(1)]
weight.initialize(mx.init.One(), ctx=contexts)
trainer = distributed.Trainer([weight], 'sgd', {'learning_rate': 6})
with autograd.record():
    losses = [(weight.data(c) * rank).sum() for c in contexts]
autograd.backward(losses)
trainer.step(2)
for context in contexts:  # 1 - 6 * 2 * (0 + 1 + 2) / 6
    assert (weight.data(context) == -5).asnumpy().all()
layer = SyncBatchNorm(in_channels=1)
layer.initialize()
trainer = distributed.Trainer(layer, 'sgd')
trainer.step(int(rank == 0), ignore_stale_grad=True)
assert 'batch_size' in error_of(trainer.step, 0)
if rank == 0:
    write_from_within(layer.running_mean.data())
distributed.broadcast_parameters(layer)
assert layer.running_mean.data().asnumpy() == 2
net = nn.Dense(2)  # whose shape is not known yet
net.initialize(mx.init.Constant(rank))
distributed.broadcast_parameters(net, root=2)
net(nd.ones((1, 3)))
assert (net.weight.data() == 2).asnumpy().all()
""",
    # All ranks update the parameters that any rank has used, and no others.
    "branches that not every rank uses": """
contexts = [mx.cpu(0), mx.cpu(1)]
net = nn.Sequential()
for _ in range(3):
    net.add(nn.Dense(1, in_units=1, use_bias=False))
net.initialize(mx.init.One(), ctx=contexts)
trainer = distributed.Trainer(net, 'sgd', {'learning_rate': 0.5, 'momentum': 0.5})
weights, momenta = np.ones(3), np.zeros(3)
for used in (0, 1, 2), (1, 0, 1), (0, 0, 0), (2, 0, 0):
    gradients = np.zeros(3)
    for other, k in enumerate(used):
        gradients[k] += (1 + other) / 4
    used_by_one = gradients > 0
    momenta[used_by_one] = (momenta / 2 - gradients / 2)[used_by_one]
    weights[used_by_one] += momenta[used_by_one]
    with autograd.record():
        loss = net[used[rank]](nd.full((1, 1), 1 + rank, ctx=contexts[rank % 2]))
    loss.backward()
    trainer.step(1 + (rank == 2), ignore_stale_grad=True)
    for context in contexts:
        found = [layer.weight.data(context).asnumpy().item() for layer in net]
        assert found == weights.tolist(), (used, found, weights)
""",
}


def test_numbers_of_three_ranks():
    """One program after the other, in the same processes."""
    run_ranks(3, in_turns(PROGRAMS))


@pytest.mark.parametrize("length", range(1, 14))
def test_samplers_of_all_ranks_have_equally_many_batches(length, monkeypatch):
    """The samplers hold all samples, and repeat only what gives each rank a row."""
    shards = []
    for rank in range(3):
        world = partial(SimpleNamespace, rank=rank, size=3)
        monkeypatch.setattr("gluon_syncbn.distributed.training.world", world)
        sampler = ShardSampler(length, 4)
        shards.append([*sampler])
        assert len(sampler) == len(shards[rank]) == len(shards[0])
        assert all(shards[rank])
        sampler.set_epoch(0)
        assert [*sampler] == shards[rank]
    samples = sum(sum(shards, []), [])
    assert {*samples} == {*range(length)}
    assert len(samples) == length + max(0, 3 - (length % 4 or 4))
