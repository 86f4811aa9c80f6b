"""Processes that begin, fork, leave and end, in any order and with pending work."""

import pytest
from support.mpi import finish, needs_mpi, run_ranks, start

pytestmark = [needs_mpi, pytest.mark.timeout(150)]

STEP = """
layers = [ready(SyncBatchNorm(in_channels=4)) for _ in range(4)]
x = nd.random.normal(shape=(3, 4))
x.attach_grad()

def push_step():
    with autograd.record():
        y = x
        for layer in layers:
            y = layer(y)
    y.backward()

def error_of_a_step():
    return error_of(lambda: (push_step(), x.grad.wait_to_read()))
"""

PROGRAMS = {
    "exit with a step in flight": "push_step(); print('done', flush=True); sys.exit(0)",
    # Rank 0 waits for rank 1 in its exit handler, before MPI_Finalize.
    "exit long before another": """
push_step()
mx.nd.waitall()
if rank == 1:
    time.sleep(1.5)
    assert 'rank 0 has left' in error_of_a_step()
""",
    "forks": """
push_step()
child = os.fork()
if child == 0:
    with autograd.train_mode():
        text = error_of(layers[0](x).wait_to_read)
    os._exit(0 if 'forked from rank' in text else 1)
assert os.waitpid(child, 0)[1] == 0
child = os.fork()
if child == 0:
    import atexit
    atexit._run_exitfuncs()  # sys.exit would wait for a thread that only the parent has
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
push_step()
""",
    "one rank leaves": """
push_step()
if rank == 0:
    distributed.shutdown()
MPI.COMM_WORLD.Barrier()  # because shutdown does not wait for rank 1
if rank == 1:
    assert 'rank 0 has left' in error_of_a_step()
distributed.shutdown()
assert 'after shutdown()' in error_of(distributed.init)
assert distributed.size() == 2
""",
    "shutdown before and after MPI.Finalize": """
push_step()
mx.nd.waitall()
if rank == 0:
    distributed.shutdown()
MPI.Finalize()
distributed.shutdown()
assert 'called after gluon_syncbn.distributed.shutdown()' in error_of_a_step()
""",
    # Rank 1 does not send its gradients, and gets rank 0's error.
    "Ctrl-C ends a wait for gradients": """
import signal, threading
from gluon_syncbn.distributed import training
from gluon_syncbn.native import failures

def wait_for_a_failure(_):
    while not failures.failure():
        time.sleep(0.1)

layer = ready(SyncBatchNorm(in_channels=1))
trainer = distributed.Trainer(layer, 'sgd')
differentiate(layer, nd.ones((2, 1)))
if rank == 1:
    training._sum_in_place = wait_for_a_failure
    assert 'KeyboardInterrupt' in error_of(trainer.step, 1)
else:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert error_of(trainer.step, 1) == 'KeyboardInterrupt()'
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_exits_forks_and_ends(name):
    run_ranks(2, STEP + PROGRAMS[name])


def test_a_rank_at_its_end_names_ranks_that_do_not_end():
    """Rank 1 is stopped after the last step, and continued after the message."""
    program = """
import signal, subprocess, threading
gluon_syncbn.set_timeout(1)
push_step()
mx.nd.waitall()
others = MPI.COMM_WORLD.allgather(os.getpid())
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    read, write = os.pipe()
    stderr = os.dup(2)
    os.dup2(write, 2)

    def wait():  # rank 0 waits in native code, without the GIL
        text = b''
        while b'waits for rank 1' not in text:
            text += os.read(read, 4096)
        os.write(stderr, b'told\\n')
        os.kill(others[1], signal.SIGCONT)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
"""
    process = start(2, STEP + program)
    output = finish(process)
    assert process.returncode == 0 and "told" in output, output


FIRST = {
    # Rank 1 calls init after the first call of rank 0 has timed out.
    "init is called again": """
from pathlib import Path
from mpi4py import MPI

own, gave_up = MPI.COMM_WORLD.rank, Path(sys.argv[1], 'gave_up')
if own == 0:
    text = error_of(distributed.init, 1)
    assert 'not every process' in text and 'within 1 s' in text, text
    gave_up.touch()
while not gave_up.exists():
    MPI.COMM_WORLD.iprobe()  # MPI may receive messages of rank 0's init here
distributed.init(30)
assert distributed.rank() == own and distributed.size() == 2
assert (distributed.local_rank(), distributed.local_size()) == (own, 2)
""",
    "mpi4py without threads is refused": """
import mpi4py
mpi4py.rc.thread_level = 'single'
from mpi4py import MPI
if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
    text = error_of(distributed.init)
    assert 'MPI was initialized without MPI_THREAD_MULTIPLE' in text, text
""",
    "without MPI": """
from pathlib import Path
from gluon_syncbn.distributed import connection
from gluon_syncbn.native import library

sys.modules['mpi4py'] = None  # as if it were not installed
assert 'needs mpi4py' in error_of(distributed.init)
del sys.modules['mpi4py']
mpi_path, connection.mpi_path = connection.mpi_path, lambda: Path(library.__file__)
text = error_of(distributed.init)
assert 'mpi4py' in text and 'library.py: invalid ELF header' in text, text
connection.mpi_path = mpi_path
library._MPI_NAME = 'no_such_library.so'
assert not gluon_syncbn.features()['mpi']
assert 'built without MPI' in error_of(distributed.init)
""",
}


@pytest.mark.parametrize("name", FIRST)
def test_before_init(name, tmp_path):
    run_ranks(2, FIRST[name], tmp_path, init="")


def test_init_ends_where_a_process_never_calls_it():
    program = """
if int(os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK']) == 0:
    distributed.init(2)
time.sleep(60)
"""
    process = start(2, program, init="")
    output = finish(process)
    assert process.returncode == 1, output
    assert "gluon_syncbn.distributed.init()" in output and " 2 s" in output, output
