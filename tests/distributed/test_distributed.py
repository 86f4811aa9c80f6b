"""Groups, steps, copies and statistics: programs that every rank runs and checks."""

import pytest
from support.mpi import in_turns, needs_mpi, run_ranks

pytestmark = [needs_mpi, pytest.mark.timeout(150)]

PROGRAMS = {
    # A layer of a group has the group's mean.
    "groups": """
def running_mean(group):
    layer = ready(SyncBatchNorm(in_channels=1, momentum=0, group=group))
    with autograd.train_mode():
        layer(nd.full((2, 1), 10 * rank)).wait_to_read()
    return layer.running_mean.data().asnumpy().item()

assert running_mean(None) == running_mean('machine') == 10
assert running_mean('process') == 10 * rank
world = gluon_syncbn.native.processes.world()
world.of_machine = [[0, 2], [1], [0, 2]][rank]  # as if rank 1 were elsewhere
assert running_mean('machine') == 10
world.of_machine = [0, 1, 2]
assert running_mean('machine') == 10
""",
    # Work that was queued before a step reads the gradient of this rank.
    "a pending read of a gradient": """
weight = ready(mx.gluon.Parameter('weight', shape=(1, 1)), mx.init.One())
trainer = distributed.Trainer([weight], 'sgd')
differentiate(lambda: (weight.data() * (rank + 1)).sum())
mx.nd.waitall()
a = mx.nd.ones((1500, 1500))
for _ in range(3):
    a = mx.nd.dot(a, a) * 1e-4
read = weight.grad() * (a[0, 0] * 0 + 1).reshape((1, 1))
trainer.step(1)
assert read.asscalar() == rank + 1
""",
    # A copy on one rank, for an export, does not shift the names of later layers.
    "a copy on one rank": """
import copy

def make():
    net = nn.HybridSequential(**prefixed('copied_'))
    with name_scope(net):
        net.add(nn.Dense(2, in_units=2), SyncBatchNorm(in_channels=2))
    net.initialize()
    return net

net = make()
distributed.broadcast_parameters(net)
if rank == 0:
    copy.deepcopy(net)
other = make()
trainer = distributed.Trainer(other, 'sgd')
for each in net, other:
    differentiate(lambda: (each(nd.full((1, 2), rank)) ** 2).sum())
trainer.step(1)
gluon_syncbn.check_replicas(other)
""",
    # The ranks without the error get none, and all continue.
    "an error in a parallel net's prediction": """
net = gluon_syncbn.make_parallel(SyncBatchNorm(in_channels=2), [mx.cpu(0), mx.cpu(1)])
net.initialize()

def step():
    differentiate(lambda: (net(nd.full((2, 2), rank)) ** 2).sum())
    mx.nd.waitall()

step()
if rank == 0:
    error_of(net, nd.ones((4, 3)))
step()
""",
    # The trainer sums float16 in float32. In float16 4096 + 2 + 2 is 4096.
    "steps and copies": """
from support.helpers import queue_hidden_write
assert (distributed.local_rank(), distributed.local_size()) == (rank, 3)
distributed.init()
weight = mx.gluon.Parameter('weight', shape=(2, 3), dtype='float16')
contexts = [mx.cpu(0), mx.cpu(1)]
weight.initialize(mx.init.One(), ctx=contexts)
trainer = distributed.Trainer([weight], 'sgd', {'learning_rate': 6})
factors = np.where(np.arange(3) == rank, 2048, 1)
with autograd.record():
    losses = [(weight.data(c) * nd.array(factors, c, 'f2')).sum() for c in contexts]
autograd.backward(losses)
trainer.step(2)
for context in contexts:  # 1 - 6 * 4100 / 6, rounded to a multiple of 4
    assert (weight.data(context) == -4100).asnumpy().all()
layer = ready(SyncBatchNorm(in_channels=1))
trainer = distributed.Trainer(layer, 'sgd')
trainer.step(int(rank == 0), ignore_stale_grad=True)
assert 'ignore_stale_grad' in error_of(trainer.step, 1)
assert 'batch_size' in error_of(trainer.step, 0)
if rank == 0:
    queue_hidden_write(layer.running_mean.data())  # writes 2
distributed.broadcast_parameters(layer)
assert layer.running_mean.data().asnumpy() == 2
net = nn.Dense(2)  # its shape is not known yet
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
    for each_rank, k in enumerate(used):
        gradients[k] += (1 + each_rank) / 4
    is_used = gradients > 0
    momenta[is_used] = (momenta / 2 - gradients / 2)[is_used]
    weights[is_used] += momenta[is_used]
    differentiate(net[used[rank]], nd.full((1, 1), 1 + rank, ctx=contexts[rank % 2]))
    trainer.step(1 + (rank == 2), ignore_stale_grad=True)
    for context in contexts:
        found = [layer.weight.data(context).asnumpy().item() for layer in net]
        assert found == weights.tolist(), (used, found, weights)
""",
    "arrays that are changed under another current context": """
for change, expected in ('gradient', 0.5), ('weight', -2):
    net = nn.Dense(1, use_bias=False)
    gluon_syncbn.make_parallel(net, [mx.cpu(0), mx.cpu(1)])
    net.initialize(mx.init.One())
    trainer = distributed.Trainer(net, 'sgd', dict(learning_rate=1))
    differentiate(lambda: net(nd.ones((4, 1))).sum())  # 12 rows have the gradient 12
    with mx.cpu(1):
        if change == 'gradient':
            net.weight.grad()[:] /= 2
        else:
            net.weight.data()[:] = -1
    trainer.step(4)
    for weight in net.weight.list_data():
        assert weight.asnumpy().item() == expected, (change, weight)
""",
    # The ranks without the failure get no error and continue.
    "a failure in prediction": """
layer = ready(SyncBatchNorm(in_channels=1))

def mean_of_training():
    with autograd.train_mode():
        layer(nd.full((2, 1), 10 * rank)).wait_to_read()
    return layer.running_mean.data().asnumpy().item()

batch_mean = 5 * (size - 1)
assert abs(mean_of_training() - 0.1 * batch_mean) < 1e-5
if rank == 1:
    used = layer.gamma, layer.beta, layer.running_mean, layer.running_var
    gamma, beta, mean, var = (p.data().as_nd_ndarray() for p in used)
    rows = mx.nd.full((1,), 9, dtype='float64')  # the batch has two
    inputs = mx.nd.ones((2, 1)), gamma, beta, rows, mean, var
    names = {'layer_key': layer._sync.key, 'op_type': 'gluon_syncbn', 'masked': 'True'}
    y = mx.nd.Custom(*inputs, **names)
    assert 'valid rows' in error_of(y.wait_to_read)
    gluon_syncbn.recover()
assert abs(mean_of_training() - 0.19 * batch_mean) < 1e-5
""",
}


def test_programs_on_three_ranks():
    run_ranks(3, in_turns(PROGRAMS))


# ---- Statistics are recomputed and compared.

STATISTICS = """
from gluon_syncbn import check_replicas, make_parallel, recompute_statistics
from gluon_syncbn.native import failures
from support.helpers import assert_near, cpus, value

# The numbers of rows of each rank's batches.
rows = [[5, 4, 1], [2, 5, 3]]
rng = np.random.default_rng(5)
shards = [[rng.normal(3, 2, (n, 3)) for n in of_rank] for of_rank in rows]

def statistics(layer):
    return value(layer.running_mean), value(layer.running_var)

def assert_moments(layer, elements):
    for result, right in zip(statistics(layer), (elements.mean(0), elements.var(0))):
        assert_near(result, right, 'float64', len(elements), scale=10)
"""

RECOMPUTING = {
    # A context of rank 0 has no row in the last batch.
    "different batches": """
contexts = cpus(2 if rank == 0 else 1)
layer = nn.BatchNorm(in_channels=3)
layer.cast('float64')
layer.initialize(ctx=contexts)
net = make_parallel(layer, contexts, sync_bn=False)
recompute_statistics(net, shards[rank])
assert_moments(layer, np.concatenate(sum(shards, [])))
check_replicas(net)
assert type(layer) is nn.BatchNorm
""",
    # Every rank raises an error and can continue.
    "different numbers of batches": """
batches = [nd.array(x, dtype='float64') for x in shards[rank]]
for short_rank in 0, 1:
    layer = SyncBatchNorm(in_channels=3)
    layer.cast('float64')
    layer.initialize()
    given = batches[1:] if rank == short_rank else batches
    text = error_of(recompute_statistics, layer, given)
    assert f'2 on rank {short_rank}' in text and f'rank {1 - short_rank}' in text, text
    mean, var = statistics(layer)
    assert (mean == 0).all() and (var == 1).all()
recompute_statistics(layer, batches)
assert_moments(layer, np.concatenate(sum(shards, [])))
""",
    "checks find differences": """
dense = ready(nn.Dense(1 + rank, in_units=2, **prefixed('dense_')))
text = error_of(check_replicas, dense)
assert all(fact in text for fact in ('weight', 'rank 1', 'rank 0')), text

net = ready(nn.Dense(1, in_units=1, **prefixed('dense_')), mx.init.One(), ctx=cpus(2))
check_replicas(net)
if rank == 1:
    net.weight.data(mx.cpu(1))[:] = 3
text = error_of(check_replicas, net)
for fact in 'rank 1', by_gluon("'dense_weight'", "'weight'"), 'cpu(0)', 'cpu(1)', '2.0':
    assert fact in text, text
""",
    "an error on one rank": """
def batches():
    yield nd.ones((2, 3))
    if rank == 1:
        raise ValueError('gone')
    yield nd.ones((2, 3))

layer = ready(SyncBatchNorm(in_channels=3))
text = error_of(recompute_statistics, layer, batches())
assert text == 'gone' if rank == 1 else 'ValueError: gone' in text, text
mean, var = statistics(layer)
assert (mean == 0).all() and (var == 1).all()
""",
}


def test_ranks_recompute_and_compare():
    run_ranks(2, STATISTICS + in_turns(RECOMPUTING))


ENDS = {
    "one rank cannot use an array": """
layer = ready(SyncBatchNorm(in_channels=3))
batches = [nd.ones((2, 3)), np.ones((rank, 3))]
assert 'must not be empty' in error_of(recompute_statistics, layer, batches)
""",
    "one rank trains": """
gluon_syncbn.set_timeout(2)
layer = ready(SyncBatchNorm(in_channels=1, momentum=0))

def train():
    with autograd.train_mode():
        layer(nd.array([[-1.0], [1.0]])).wait_to_read()

batches = [nd.full((2, 1), 1000)]
text = error_of(recompute_statistics, layer, batches) if rank == 0 else error_of(train)
assert 'recompute_statistics' in text and 'Missing: rank 1' in text, text
failures.give_up('the expected error was raised')  # cancels pending work
assert statistics(layer) == (0, 1)
""",
}


@pytest.mark.parametrize("name", ENDS)
def test_errors_that_end_recomputing(name):
    run_ranks(2, STATISTICS + ENDS[name])
