"""Errors and effects of `import gluon_syncbn`, and the version of the package."""

import re

import gluon_syncbn

import numpy as np
import pytest
from support.helpers import ROOT, output_of, run_python, run_tool


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
