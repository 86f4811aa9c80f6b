"""Errors and effects of `import gluon_syncbn`, and the version of the package."""

import re

import gluon_syncbn

import numpy as np
import pytest
from support.helpers import (
    RESTORE_NUMPY_NAMES,
    ROOT,
    output_of,
    run_python,
    run_tool,
)


def import_beside(folder, mxnet, file="mxnet.py"):
    """Import the package beside this text as mxnet; return stderr's last line."""
    (folder / file).write_text(mxnet)
    path = f"{folder}:{ROOT}"
    result = run_python("import gluon_syncbn", PYTHONPATH=path)
    return result.stderr.splitlines()[-1]


ACCEPTED = "1.6.0", "1.7.0.post2", "1.9.0b20210101"


@pytest.mark.parametrize("version", [*ACCEPTED, "2.1.0", "1.5.1.post0", "1.10.0", "?"])
def test_other_versions_are_refused(tmp_path, version):
    text = import_beside(tmp_path, f"__version__ = {version!r}")
    found = f"got {version}. " in text and "`pip install mxnet==1.9.1`" in text
    assert found == (version not in ACCEPTED)


MISSING = {  # the error of MXNet's import, and our error
    "ModuleNotFoundError('no', name='mxnet')": r"ModuleNotFoundError: .*"
    r"`pip install (--no-deps )?mxnet==1.9.1`.*mxnet-cu112",
    "OSError('libcudnn.so.8: cannot open')": r"ImportError: .*libcudnn.so.8.*"
    r"`pip install '.\[cuda\]'`",
    "OSError('libcuda.so.1: cannot open')": r"ImportError: .*libcuda.so.1.*driver",
    "OSError('libquadmath.so.0: cannot open')": r"ImportError: .*libquadmath.so.0.*"
    r"`apt install libgomp1 libquadmath0`",
    "OSError('libopenblas.so.0: cannot open')": r"OSError: libopenblas",  # MXNet's own
}


@pytest.mark.parametrize("error", MISSING)
def test_what_mxnet_lacks_is_named_with_its_fix(tmp_path, error):
    assert re.match(MISSING[error], import_beside(tmp_path, f"raise {error}"))


def make_library_of_package(folder, name):
    """Build a library without functions where NVIDIA's packages have theirs."""
    file = folder / "nvidia" / name.split(".")[0] / "lib" / name
    file.parent.mkdir(parents=True)
    source = "-x", "c++", "/dev/null"
    run_tool("c++", "-shared", *source, f"-Wl,-soname,{name}", "-o", file)


def test_libraries_of_packages_are_loaded(tmp_path):
    """MXNet finds CUDA libraries that pip installed, without LD_LIBRARY_PATH."""
    names = "libcudnn.so.8", "libnccl.so.2"
    for name in names:
        make_library_of_package(tmp_path, name)
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / "imported_first.py").touch()
    text = import_beside(
        tmp_path,
        "from . import imported_first; from ctypes import CDLL\n"
        f"for name in {names}: CDLL(name)\n"
        "__version__ = __import__('mxnet').imported_first.__name__",
        "mxnet/__init__.py",
    )
    assert "got mxnet.imported_first. " in text


def test_a_library_of_a_package_is_loaded_once(tmp_path):
    make_library_of_package(tmp_path, "libcudnn.so.8")
    text = import_beside(tmp_path, "raise OSError('libcudnn.so.8: cannot open')")
    assert re.match(r"ImportError: .*libcudnn.so.8", text)


def test_names_that_numpy_has_are_left_alone():
    program = (
        "import sys, numpy as np; sys.modules['mxnet'] = None; had = dict(vars(np))\n"
        "try: import gluon_syncbn\n"
        "except ModuleNotFoundError: pass\n"
        "added = set(vars(np)) - set(had)\n"
        "assert all(vars(np)[name] is had[name] for name in had)\n"
        "print(len(added), all(hasattr(np, name) for name in added))"
    )
    expected = 0 if np.lib.NumpyVersion(np.__version__) < "1.24.0" else 1
    count, found = output_of(program).split()
    assert (int(count) > 0) == expected and found == "True"


def test_one_version_for_all():
    """CHANGELOG.md and CITATION.cff have the version of the package."""
    version = gluon_syncbn.__version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (\d.*)$", changes, re.MULTILINE).group(1) == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


QUIET = (
    RESTORE_NUMPY_NAMES
    + """
import os, signal
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

OWNERS = [
    *(gluon.Trainer, mx.optimizer.Updater, gluon.Block, gluon.HybridBlock),
    *(gluon.SymbolBlock, gluon.Parameter, gluon.ParameterDict, nn.BatchNorm),
    *(autograd._RecordingStateScope, autograd.Function, mx.nd.NDArray),
    *(autograd, mx.base, mx.random, mx.engine, gluon.contrib.nn, mx.contrib),
]

FUNCTIONS = "MXGetLastError MXAutogradBackwardEx MXInvokeCachedOpEx MXNDArrayFree"

def state():
    attributes = [{k: id(v) for k, v in vars(owner).items()} for owner in OWNERS]
    # ctypes adds an attribute to _LIB when a C function is first looked up.
    found = {k: id(getattr(mx.base._LIB, k)) for k in FUNCTIONS.split()}
    handlers = {n: str(signal.getsignal(n)) for n in signal.valid_signals()}
    threads = dict.fromkeys(os.listdir("/proc/self/task"), 1)
    return [*attributes, found, handlers, threads]

def check(before, after_what):
    names = [*(str(owner) for owner in OWNERS), "MXNet's library", "signals", "threads"]
    for name, old, new in zip(names, before, state()):
        changed = {k for k in {*old, *new} if old.get(k) != new.get(k)}
        assert not changed, f"{after_what} changes {changed} of {name}"

def train(norm=nn.BatchNorm):
    mx.random.seed(0)
    np.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    net.add(nn.Conv2D(4, 3, in_channels=3), norm(in_channels=4), nn.Dense(1))
    net.initialize()
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "adam")
    x = mx.nd.array(np.random.normal(size=(5, 3, 6, 6)))
    for _ in range(10):
        with autograd.record():
            loss = (net(x) ** 2).mean()
        loss.backward()
        trainer.step(1)
    mx.nd.waitall()
    values = [p.data().asnumpy().tobytes() for p in net.collect_params().values()]
    return b"".join(values).hex(), vars(trainer).keys()

expected = train()  # starts MXNet's threads
before = state()
import gluon_syncbn
check(before, "importing")
assert train() == expected
check(before, "training without our layers")
train(gluon_syncbn.SyncBatchNorm)
assert train() == expected, "training with our layers changes other nets"
"""
)


def test_importing_changes_neither_mxnet_nor_other_nets():
    output_of(QUIET)
