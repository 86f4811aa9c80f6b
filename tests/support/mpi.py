"""Runs a program on several ranks under mpirun, with a watchdog."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gluon_syncbn

import pytest

from support.helpers import ROOTS

SECONDS = 90  # a rank that hangs ends after this time

PREAMBLE = f"""
import faulthandler, os, sys, time
faulthandler.dump_traceback_later({SECONDS}, exit=True)
import gluon_syncbn
import mxnet as mx, numpy as np
from mxnet import autograd
from mxnet.gluon import nn
from gluon_syncbn import Devices, SyncBatchNorm, distributed
from support.blocks import by_gluon, name_scope, prefixed
from support.helpers import differentiate, ready
from support.nd import nd

def error_of(function, *arguments):
    try:
        function(*arguments)
    except (KeyboardInterrupt, RuntimeError, UserWarning, ValueError) as error:
        return str(error) or repr(error)
    raise AssertionError('nothing was raised')
"""
INIT = """
distributed.shutdown()  # does nothing before init
distributed.init(30)
gluon_syncbn.set_timeout(20)
rank, size = distributed.rank(), distributed.size()
from mpi4py import MPI
"""


def _mpirun():
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


needs_mpi = pytest.mark.skipif(
    not gluon_syncbn.features()["mpi"] or not _mpirun(),
    reason="built without MPI, or there is no mpirun",
)


def launcher(ranks):
    version = subprocess.run([_mpirun(), "--version"], capture_output=True, text=True)
    is_mpich = "HYDRA" in version.stdout  # else Open MPI
    options = [] if is_mpich else ["--allow-run-as-root", "--oversubscribe"]
    return [_mpirun(), *options, "-n", str(ranks)]


def start(ranks, body, *arguments, init=INIT):
    """Start a program of `body` on each rank; return the launcher's process."""
    program = [sys.executable, "-c", PREAMBLE + init + body, *map(str, arguments)]
    return subprocess.Popen(
        launcher(ranks) + program,
        env={**os.environ, "PYTHONPATH": ROOTS, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process):
    """Wait for the ranks to end; return what they printed."""
    try:
        output, _ = process.communicate(timeout=SECONDS + 20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"the ranks did not end: {output[-6000:]}") from None
    return output


def in_turns(programs):
    """Return one program that runs the programs of a dict one after the other."""
    return f"""
for name, program in {programs!r}.items():
    print('begin', name, flush=True)
    exec(compile(program, name, 'exec'), dict(globals()))
    mx.nd.waitall()
    MPI.COMM_WORLD.Barrier()
"""


def run_ranks(ranks, body, *arguments, **options):
    """Run `body` on each rank. Every rank has to reach the end and exit with 0."""
    body += "\nprint('done', flush=True)"
    process = start(ranks, body, *arguments, **options)
    output = finish(process)
    assert process.returncode == 0 and output.count("done") == ranks, output[-6000:]
