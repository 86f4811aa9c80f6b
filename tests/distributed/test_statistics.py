"""Statistics of several processes: recomputed and compared.

Each program runs on every rank and asserts there.
"""

import pytest
from support.mpi import in_turns, needs_mpi, run_ranks

pytestmark = [needs_mpi, pytest.mark.timeout(150)]


DATA = """
from gluon_syncbn import check_replicas, make_parallel, recompute_statistics
from gluon_syncbn.native import failures
from support.helpers import assert_near, cpus, value

# The rows of each rank's batches on each of its contexts.
rows = [[[3, 2], [4], [1]], [[2], [5], [3]]]
rng = np.random.default_rng(5)
shards = [[rng.normal(3, 2, (sum(n), 3)) for n in of_rank] for of_rank in rows]

def statistics(layer):
    return value(layer.running_mean), value(layer.running_var)

def assert_moments(layer, elements):
    for result, right in zip(statistics(layer), (elements.mean(0), elements.var(0))):
        assert_near(result, right, 'float64', len(elements), scale=10)
"""


PROGRAMS = {
    # Rank 0 has two contexts, of which one is without a row in the last batch.
    "batches of their own": """
contexts = cpus(2 if rank == 0 else 1)
layer = nn.BatchNorm(in_channels=3)
layer.cast('float64')
layer.initialize(ctx=contexts)
net = make_parallel(layer, contexts, sync_bn=False)
recompute_statistics(net, shards[rank])
assert_moments(layer, np.concatenate(sum(shards, [])))
assert_same_bits(*statistics(layer))
check_replicas(net)
assert type(layer) is nn.BatchNorm

# The second layer's inputs show that the first one normalizes over both ranks.
net = nn.HybridSequential()
for part in SyncBatchNorm(in_channels=3), nn.Activation('relu'), SyncBatchNorm():
    net.add(part)
net.cast('float64')
net.initialize()
net.hybridize()
recompute_statistics(net, [nd.array(x, dtype='float64') for x in shards[rank]])
seen = []
for k in range(3):
    x = np.concatenate([of_rank[k] for of_rank in shards])
    seen.append(np.maximum((x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5), 0))
assert_moments(net[2], np.concatenate(seen))
assert_same_bits(*statistics(net[2]))
""",
    # All ranks get the error at once, and can go on.
    "other numbers of batches": """
batches = [nd.array(x, dtype='float64') for x in shards[rank]]
for few in 0, 1:
    layer = SyncBatchNorm(in_channels=3)
    layer.cast('float64')
    layer.initialize()
    own = batches[1:] if rank == few else batches
    text = error_of(recompute_statistics, layer, own)
    assert f'2 on rank {few}' in text and f'rank {1 - few}' in text, text
    mean, var = statistics(layer)
    assert (mean == 0).all() and (var == 1).all()
recompute_statistics(layer, batches)
assert_moments(layer, np.concatenate(sum(shards, [])))
""",
    "checks find differences": """
is_gluon_1 = prefixed('x')
dense = nn.Dense(1 + rank, in_units=2, **prefixed('dense_'))
dense.initialize()
text = error_of(check_replicas, dense)
assert all(fact in text for fact in ('weight', 'rank 1', 'rank 0')), text

net = nn.Dense(1, in_units=1, **prefixed('dense_'))
net.initialize(mx.init.One(), ctx=cpus(2))
check_replicas(net)
if rank == 1:
    net.weight.data(mx.cpu(1))[:] = 3
text = error_of(check_replicas, net)
name = 'dense_weight' if is_gluon_1 else 'weight'
for fact in 'rank 1', f"'{name}'", 'cpu(0)', 'cpu(1)', '2.0':
    assert fact in text, text
""",
    "an error on one rank": """
def batches():
    yield nd.ones((2, 3))
    if rank == 1:
        raise ValueError('gone')
    yield nd.ones((2, 3))

layer = SyncBatchNorm(in_channels=3)
layer.initialize()
text = error_of(recompute_statistics, layer, batches())
assert text == 'gone' if rank == 1 else 'ValueError: gone' in text, text
failures.give_up("errors in flight")
mean, var = statistics(layer)
assert (mean == 0).all() and (var == 1).all()
""",
}


def test_ranks_recompute_and_compare():
    """One program after the other, in the same processes."""
    run_ranks(2, DATA + in_turns(PROGRAMS))


def test_a_rank_that_recomputes_meets_no_training_step():
    program = """
gluon_syncbn.set_timeout(2)
layer = SyncBatchNorm(in_channels=1, momentum=0)
layer.initialize()

def train():
    with autograd.train_mode():
        layer(nd.array([[-1.0], [1.0]])).wait_to_read()

batches = [nd.full((2, 1), 1000)]
text = error_of(recompute_statistics, layer, batches) if rank == 0 else error_of(train)
assert 'recompute_statistics' in text and 'Missing: rank 1' in text, text
failures.give_up('errors in flight')
assert statistics(layer) == (0, 1)
"""
    run_ranks(2, DATA + program)
