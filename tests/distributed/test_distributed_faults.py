"""All ranks get an error when one hangs, fails or makes a different net."""

import pytest
from support.helpers import run_python
from support.mpi import finish, needs_mpi, run_ranks, start

pytestmark = [needs_mpi, pytest.mark.timeout(150)]

NET = """
gluon_syncbn.set_timeout(2)

first, second = (SyncBatchNorm(in_channels=4, **prefixed(f'norm{i}_')) for i in (0, 1))
for layer in first, second:
    layer.initialize()
x = nd.random.normal(shape=(3, 4))
x.attach_grad()

def step(between=lambda: None):
    with autograd.record():
        y = first(x)
        y.wait_to_read()
        between()
        y = second(y)
    y.backward()
    x.grad.wait_to_read()
"""


@pytest.mark.parametrize(
    "call, fact",
    [
        ("step, stop_rank_1", "Arrived: rank 0. Missing: rank 1"),
        ("distributed.broadcast_parameters, first, 1", "within 2 s"),
    ],
)
def test_a_rank_that_hangs_is_killed_when_the_other_ends(call, fact):
    """Rank 1 hangs between two layers, or between an exchange and MPI's collective."""
    program = f"""
import signal
from gluon_syncbn.distributed import collectives

def stop_rank_1(*arguments):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)

step()
if rank == 1:
    collectives.collectives = stop_rank_1
text = error_of({call})
assert {fact!r} in text, text
print('told', flush=True)
"""
    process = start(2, NET + program)
    output = finish(process)
    assert process.returncode != 0 and "told" in output, output
    assert "because one of them hangs after a failure" in output, output


STEPS_APART = {  # code that makes a rank differ: facts in the error
    "step(update=trainers[0].update) if rank else None": ("num_update 1", "update 2"),
    "trainers.reverse(); nets.reverse()": ("number ", "trainer"),
    "(norm.beta if rank else norm.gamma).grad_req = 'null'": ("beta", "gamma"),
    "dense.bias.grad_req = 'null'": ("bias", "momentum"),
    "trainers[0].set_learning_rate(0.5)": ("rate 0.25", "rate 0.5"),
    "trainers[0].optimizer.wd = 0.125": ("wd 0.0", "wd 0.125"),
    "dense.bias.lr_mult = 3": ("1.0, 1.0", "3, 1.0"),
    "trainers[0].optimizer.beta1 = 0.5": ("beta1 0.9", "beta1 0.5"),
    "trainers[0].optimizer.clip_gradient = 1": ("gradient None", "gradient 1"),
    "trainers[0]._scale = 2": ("scale of gradients 1.0", "scale of gradients 2"),
    "trainers[0]._optimizer.__class__ = mx.optimizer.Adamax": ("Adam on", "Adamax"),
    "norm._kwargs['momentum'] = 0.5": ("'momentum': 0.9", "'momentum': 0.5"),
    "norm._sync.settings = norm._sync.settings._replace(nonfinite='raise')": (
        "'nonfinite': 'skip'",
        "'nonfinite': 'raise'",
    ),
    "dense.cast('float64')": ("'float32'", "'float64'"),
}

PROGRAMS = {
    "an exception on one rank ends the others": """
gluon_syncbn.set_timeout(60)
def forward(x):
    if rank == 1:
        raise ValueError('no such sample')
    with autograd.train_mode():
        return first(x)
devices = Devices(mx.cpu())
text = error_of(lambda: devices.map(forward, [x])[0].wait_to_read())
assert 'no such sample' in text and ('rank 1' in text) == (rank == 0), text
text = error_of(gluon_syncbn.recover)
assert 'recover()' in text and 'no such sample' in text, text
assert 'no such sample' in error_of(step)
""",
    # It tells the other ranks, which then do not wait either.
    "recover ends the wait for a rank": """
gluon_syncbn.set_timeout(60)
step()
if rank == 0:
    with autograd.train_mode():
        y = first(x)
    from gluon_syncbn.native.library import load
    while load().gluon_syncbn_longest_wait() == 0:  # MXNet has not yet run the layer
        time.sleep(0.01)
    assert 'recover() was called' in error_of(gluon_syncbn.recover)
else:
    from gluon_syncbn.native import failures
    while not failures.failure():
        time.sleep(0.1)
""",
    "an error of MPI is raised without a crash": """
from gluon_syncbn.native.processes import world
step()
if rank == 1:  # the package receives messages of at most 2**24 bytes
    world().comm.Send(np.zeros(2**24 + 1, np.uint8), 0)
for _ in range(2):
    assert 'MPI_Test failed' in error_of(step)
""",
    "nets that differ are found before training": """
net = nn.HybridSequential(**prefixed('net_'))
with name_scope(net):
    layers = {name: SyncBatchNorm(in_channels=3) for name in ['ab', 'ba'][rank]}
for name in 'ab':
    setattr(net, name, layers[name])
net.initialize()
text = error_of(distributed.broadcast_parameters, net)
if by_gluon(True, False):  # names begin with the prefix of a block
    assert 'net_batchnorm0_gamma' in text and 'net_batchnorm1_gamma' in text, text
    assert 'a.gamma' in text, text
    layer = ready(SyncBatchNorm(in_channels=3, prefix='x_', momentum=0.5 + rank / 4))
    text = error_of(distributed.broadcast_parameters, layer)
    assert "'x'" in text and "0.5" in text and "0.75" in text, text
else:  # first and second have the numbers 0 and 1
    assert "'batchnorm2' at a" in text and "'batchnorm3' at a" in text, text
dense = nn.Dense(3, in_units=2, **prefixed('dense_'))
text = error_of(distributed.broadcast_parameters, dense)
assert by_gluon('dense_weight', 'weight') in text and 'initialize' in text, text
""",
    "ranks whose steps differ": f"""
def step(update=None):
    with autograd.record():
        y = nets[0][0](nd.ones((1, 3)) * (rank + 1))
        loss = nets[0][1](y.astype(nets[0][1].weight.dtype)).sum()
    loss.backward()
    (update or trainers[0].step)(1)

def values():
    return [p.data().asnumpy() for p in nets[0].collect_params('.*[^nr]$').values()]

gluon_syncbn.set_timeout(60)
for change, expected in {STEPS_APART}.items():
    nets, trainers = [], []
    for _ in range(2):
        net = nn.HybridSequential()
        net.add(SyncBatchNorm(in_channels=3, nonfinite='skip', group='process'))
        net.add(nn.Dense(2, in_units=3))
        net.initialize()
        nets.append(net)
        trainers.append(distributed.Trainer(net, 'adam', {{'learning_rate': 0.25}}))
    norm, dense = nets[0]
    step()
    if rank == 1 or ' if rank else ' in change:
        exec(change)
    before = values()
    text = error_of(step)
    assert 'rank 0' in text and 'rank 1' in text, text
    assert all(words in text for words in expected), text
    assert len(before) == 4 and all(map(np.array_equal, before, values()))
""",
    "a Gluon Trainer is refused if processes synchronize": """
def step(group):
    layer = ready(SyncBatchNorm(group=group))
    trainer = mx.gluon.Trainer(layer.collect_params(), 'sgd')
    differentiate(layer, nd.ones((2, 3)))
    trainer.step(2)

step('process')
assert 'gluon_syncbn.distributed.Trainer' in error_of(step, None)
mx.nd.waitall()  # if one rank exits first, the other rank's step fails
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_faults_on_two_ranks(name):
    run_ranks(2, NET + PROGRAMS[name])


def test_one_process_where_the_launcher_started_more():
    code = "from gluon_syncbn import distributed; distributed.init()"
    result = run_python(code, SLURM_NTASKS="4")
    assert result.returncode == 1
    error = result.stderr.splitlines()[-1]
    assert "RuntimeError: SLURM_NTASKS is 4" in error and "mpirun" in error
