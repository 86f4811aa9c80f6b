"""Graph modes, training, comparisons and subprocesses for all tests."""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_void_p, cast, py_object
from pathlib import Path

from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.mxnet_private.arrays import push

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import SymbolBlock

from support import reference
from support.nd import nd

ROOT = Path(__file__).resolve().parents[2]
# A program that does not import the package begins with this (see compat.py).
RESTORE_NUMPY_NAMES = (
    f"import runpy; runpy.run_path({str(ROOT / 'gluon_syncbn' / 'compat.py')!r})\n"
)
# PYTHONPATH of programs that tests start.
ROOTS = os.pathsep.join(str(ROOT / folder) for folder in ("", "tests", "scripts"))

# Arguments of hybridize for each mode of a Gluon net; None is imperative.
MODES = {
    "imperative": None,
    "hybridize": {},
    "static_alloc": {"static_alloc": True},
    "static_shape": {"static_alloc": True, "static_shape": True},
}


def repetitions():
    return int(os.environ["GLUON_SYNCBN_REPEAT"])


def cpus(count, first=0):
    return [mx.cpu(first + i) for i in range(count)]


class Loop:
    """A replacement for `gluon_syncbn.Devices` whose `map` starts no threads."""

    def __init__(self, contexts):
        self.contexts = contexts

    def map(self, function, *lists):
        return [function(*elements) for elements in zip(*lists)]


def set_mode(net, mode):
    if MODES[mode] is not None:
        net.hybridize(**MODES[mode])
    return net


def put(arrays, contexts, dtype="float32"):
    return [nd.array(a, ctx=c, dtype=dtype) for a, c in zip(arrays, contexts)]


def split_rows(x, rows, axis=0):
    return np.split(x, np.cumsum(rows)[:-1], axis)


def train_step(devices, net, shards, dys):
    """Record forward, run backward on every context; return lists of y and dx."""
    for x in shards:
        x.attach_grad()
    ys = [y.asnumpy() for y in queue_step(devices, net, shards, dys)]
    return ys, [x.grad.asnumpy() for x in shards]


def queue_step(devices, net, shards, dys):
    """Queue a step without waiting for it; return y as NDArrays."""

    def step(x, dy):
        with autograd.record():
            y = net(x)
        y.backward(dy)
        return y

    return devices.map(step, shards, dys)


def ready(block, *arguments, **options):
    """Initialize a block; return it."""
    block.initialize(*arguments, **options)
    return block


def step_of_layer(x, dy, train_mode=True, axis=1, reads_y=False, **options):
    """Return y, dx and dgamma of a new SyncBatchNorm, for NDArrays or NumPy arrays."""
    options = {"axis": axis, "in_channels": x.shape[axis], **options}
    layer = SyncBatchNorm(num_devices=1, **options)
    layer.cast(str(np.dtype(x.dtype)))
    layer.initialize()
    if isinstance(x, np.ndarray):
        x, dy = (nd.array(a, dtype=str(x.dtype)) for a in (x, dy))
    x.attach_grad()
    with autograd.record(train_mode):
        y = layer(x)
    if reads_y:
        y.asnumpy()  # makes y row-major
    y.backward(dy)
    return [array.asnumpy() for array in (y, x.grad, layer.gamma.grad())]


def differentiate(function, *arguments):
    with autograd.record():
        y = function(*arguments)
    y.backward()
    return y


def whole(shards):
    return np.concatenate([shard.asnumpy() for shard in shards])


def copy_parameters(net, other):
    pairs = zip(other.collect_params().values(), net.collect_params().values())
    for parameter, given in pairs:
        # A parameter with deferred initialization keeps the array, so pass a copy.
        parameter.set_data(given.data().copy())


def value(parameter, index=0):
    return parameter.list_data()[index].asnumpy()


def values(net):
    return [value(parameter) for parameter in net.collect_params().values()]


def summed_grad(parameter):
    """Return a parameter's gradient for the whole batch."""
    first, *others = (g.asnumpy().astype(np.float64) for g in parameter.list_grad())
    if getattr(parameter, "is_summed", False):  # a parameter of a parallel net
        assert all((other == first).all() for other in others)
        return first
    return sum(others, first)


def assert_near(
    result, expected, dtype="float32", count=1, conditioning=0.0, scale=1.0
):
    assert np.shape(result) == np.shape(expected)
    rtol, atol = reference.tolerance(dtype, count, conditioning, scale)
    np.testing.assert_allclose(result, expected, rtol, atol)


def assert_all_near(results, expected, dtype="float64", count=1, scale=1.0):
    assert len(results) == len(expected)
    for result, right in zip(results, expected):
        largest = max(1.0, abs(right).max())
        assert_near(result, right, dtype, count, scale=scale * largest)


def operators(net):
    """Return the operators in the graph of a net that has one input."""
    symbol = mx.sym.Group(list(net(mx.sym.var("data"))))
    return [node["op"] for node in json.loads(symbol.tojson())["nodes"]]


def imported(path, *inputs, epoch=0):
    """Load the files of `export` as a block. `inputs` defaults to "data"."""
    symbol, parameters = f"{path}-symbol.json", f"{path}-{epoch:04d}.params"
    return SymbolBlock.imports(symbol, inputs or ["data"], parameters)


_kept = []  # keeps arrays alive for queued work


@CFUNCTYPE(None, c_void_p, c_void_p)
def _write_two(_, array):
    time.sleep(0.2)  # code that does not wait would read the old values meanwhile
    cast(array, py_object).value[:] = 2


def queue_hidden_write(array):
    """Queue a write of 2 that is declared as a read, as oneDNN writes to weights."""
    _kept.append(array)
    push(_write_two, id(array), array.context, [array])


@contextmanager
def busy_worker(context):
    """Block the engine thread (worker) of a CPU context during the `with` block."""
    began, end = threading.Event(), threading.Event()

    @CFUNCTYPE(None, c_void_p, c_void_p)
    def work(_context, _parameter):
        began.set()
        end.wait(60)

    push(work, 0, context, [])
    assert began.wait(60)
    yield
    end.set()


def run_python(code, *arguments, timeout=60, **environment):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": ROOTS, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def output_of(code, *arguments, **options):
    """Run Python code that has to succeed; return its standard output."""
    result = run_python(code, *arguments, **options)
    assert result.returncode == 0, result.stderr[-6000:]
    return result.stdout


def status(field):
    """Return the number in a field of /proc/self/status, such as VmRSS (in KiB)."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))


def run_tool(*command, timeout=800):
    """Run a program that has to succeed; return its output and its errors."""
    result = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    return result.stdout


# ---- Users' mistakes: a small layer, its data, an error's text.

X, DY = np.random.default_rng(0).normal(1, 2, (2, 4, 3, 2, 5)).astype("float32")


def make_layer(contexts, timeout=0.5, **arguments):
    layer = SyncBatchNorm(in_channels=3, timeout=timeout, **arguments)
    layer.initialize(ctx=contexts)
    return layer


def assert_trains(devices, layer):
    """Check that a step gives y and dx of the oracle."""
    ys, dxs = train_step(devices, layer, devices.split(X), devices.split(DY))
    ones, zeros = np.ones(3), np.zeros(3)
    expected, _, _, inv_std = reference.forward(X, ones, zeros)
    assert_near(np.concatenate(ys), expected, count=40, scale=abs(expected).max())
    scale = inv_std.max() * abs(DY).max()
    expected = reference.backward(X, DY, ones)[0]
    assert_near(np.concatenate(dxs), expected, count=40, scale=scale)


def failure_of(wait, *arguments):
    with pytest.raises(mx.MXNetError) as caught:
        wait(*arguments)
    return str(caught.value)
