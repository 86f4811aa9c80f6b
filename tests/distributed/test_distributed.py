"""Several processes under mpirun: the numbers equal the oracle on all ranks' rows.

Each program runs on every rank and asserts there.
"""

from functools import partial
from types import SimpleNamespace

from gluon_syncbn.distributed import ShardSampler

import pytest
from support.mpi import in_turns, needs_mpi, run_ranks

pytestmark = [needs_mpi, pytest.mark.timeout(150)]


OF_THREE_RANKS = {
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
}


OF_TWO_RANKS = {
    # Rank 0 has two contexts, rank 1 one; the last batch wraps around.
    "training equals one device": """
rng = np.random.default_rng(0)
data, labels = rng.normal(1, 2, (13, 3, 6, 6)), rng.normal(size=(13, 5))
STEPS = dict(optimizer='sgd', optimizer_params={'learning_rate': 0.03, 'momentum': 0.5})

def make(norm):
    mx.random.seed(7 + rank)  # only the broadcast makes ranks equal
    net = nn.HybridSequential(**prefixed('net_'))
    with name_scope(net):
        for channels, inputs in (4, 3), (6, 4):
            net.add(nn.Conv2D(channels, 3, padding=1, in_channels=inputs))
            net.add(norm(in_channels=channels, momentum=0.5), nn.Activation('relu'))
        net.add(nn.Dense(5, in_units=6 * 36))
    net.cast('float64')
    if norm is SyncBatchNorm:
        gluon_syncbn.make_parallel(net, [mx.cpu(0), mx.cpu(1)][: 2 - rank])
    net.initialize(mx.init.Xavier())
    net(nd.ones((1, 3, 6, 6), dtype='float64'))
    return net

def train(net, trainer, epochs):
    losses = []
    for batches in epochs:
        total = 0.0
        for rows in batches:
            x, y = (nd.array(v[rows], dtype='float64') for v in (data, labels))
            with autograd.record():
                loss = ((net(x) - y) ** 2).sum()
            loss.backward()
            trainer.step(len(rows))
            total += loss.asnumpy().item()
        losses.append(total)
    return np.array(losses)

ours = make(SyncBatchNorm)
trainer = distributed.Trainer(ours, **STEPS)
plain = make(nn.BatchNorm)
for a, b in zip(plain.collect_params().values(), ours.collect_params().values()):
    a.set_data(b.data().copy())
single = mx.gluon.Trainer(plain.collect_params(), **STEPS)

sampler = distributed.ShardSampler(13, 4, seed=1)
own = [list(sampler) for epoch in range(3)]
losses = MPI.COMM_WORLD.allreduce(train(ours, trainer, own))
shards = zip(*MPI.COMM_WORLD.allgather(own))  # of both ranks, by epoch
whole = [[a + b for a, b in zip(*both)] for both in shards]
expected = train(plain, single, whole)
np.testing.assert_allclose(losses, expected, rtol=1e-9)
values = [p.data().asnumpy() for p in ours.collect_params().values()]
for value, other in zip(values, plain.collect_params().values()):
    np.testing.assert_allclose(value, other.data().asnumpy(), rtol=1e-7, atol=1e-9)
momenta = [s.asnumpy() for s in trainer._updaters[0].states.values() if s is not None]
assert len(momenta) == 10
assert_same_bits(*values, *momenta)
gluon_syncbn.check_replicas(ours)
""",
    # All ranks update what one has used, on one of its contexts; nothing else.
    "branches that not every rank uses": """
contexts = [mx.cpu(0), mx.cpu(1)]
net = nn.Sequential()
for _ in range(3):
    net.add(nn.Dense(1, in_units=1, use_bias=False))
net.initialize(mx.init.One(), ctx=contexts)
trainer = distributed.Trainer(net, 'sgd', {'learning_rate': 0.5, 'momentum': 0.5})
weights, momenta = np.ones(3), np.zeros(3)
for used in (0, 1), (1, 0), (0, 0), (2, 0):
    gradients = np.zeros(3)
    for other, k in enumerate(used):
        gradients[k] += (1 + other) / 2
    used_by_one = gradients > 0
    momenta[used_by_one] = (momenta / 2 - gradients / 2)[used_by_one]
    weights[used_by_one] += momenta[used_by_one]
    with autograd.record():
        loss = net[used[rank]](nd.full((1, 1), 1 + rank, ctx=contexts[rank]))
    loss.backward()
    trainer.step(1, ignore_stale_grad=True)
    for context in contexts:
        found = [layer.weight.data(context).asnumpy().item() for layer in net]
        assert found == weights.tolist(), (used, found, weights)
""",
    # The other rank is not told, so the ranks go on.
    "a failure in prediction": """
layer = SyncBatchNorm(in_channels=1)
layer.initialize()

def mean_of_training():
    with autograd.train_mode():
        layer(nd.full((2, 1), 10 * rank)).wait_to_read()
    return layer.running_mean.data().asnumpy().item()

assert mean_of_training() == 0.5
if rank == 1:
    used = layer.gamma, layer.beta, layer.running_mean, layer.running_var
    gamma, beta, mean, var = (p.data().as_nd_ndarray() for p in used)
    rows = mx.nd.full((1,), 9, dtype='float64')  # of two
    inputs = mx.nd.ones((2, 1)), gamma, beta, rows, mean, var
    names = {'layer_key': layer.key, 'op_type': 'gluon_syncbn', 'masked': 'True'}
    y = mx.nd.Custom(*inputs, **names)
    assert 'valid rows' in error_of(y.wait_to_read)
    gluon_syncbn.recover()
assert abs(mean_of_training() - 0.95) < 1e-6
""",
}


@pytest.mark.parametrize("ranks, programs", [(3, OF_THREE_RANKS), (2, OF_TWO_RANKS)])
def test_numbers_of_several_ranks(ranks, programs):
    """One program after the other, in the same processes."""
    run_ranks(ranks, in_turns(programs))


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
