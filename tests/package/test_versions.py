"""Versions: the package's own, and the versions of MXNet that it accepts."""

import re
import sys

import gluon_syncbn

import numpy as np
import pytest
from support.helpers import ROOT, output_of, run_python


def import_beside(folder, mxnet, program="import gluon_syncbn"):
    """Run a program where MXNet consists of one line; return its last line."""
    (folder / "mxnet.py").write_text(mxnet)
    path = f"{folder}:{ROOT}"
    return run_python(program, PYTHONPATH=path).stderr.splitlines()[-1]


ACCEPTED = "1.6.0", "1.7.0.post2", "1.9.0b20210101"


@pytest.mark.parametrize("version", [*ACCEPTED, "2.1.0", "1.5.1.post0", "1.10.0", "?"])
def test_other_versions_are_refused(tmp_path, version):
    text = import_beside(tmp_path, f"__version__ = {version!r}")
    found = f"got {version}. " in text and "`pip install mxnet==1.9.1`" in text
    assert found == (version not in ACCEPTED)


def test_a_missing_mxnet_is_named_with_its_fix(tmp_path):
    missing = "raise ModuleNotFoundError('no', name='mxnet')"
    for program in "import gluon_syncbn", "import gluon_syncbn.__main__":
        text = import_beside(tmp_path, missing, program)
        assert text.startswith("ModuleNotFoundError: ") and "mxnet-cu112" in text
        no_deps = sys.version_info >= (3, 13)
        assert f"`pip install {'--no-deps ' * no_deps}mxnet==1.9.1`" in text


@pytest.mark.parametrize(
    "library, pattern",
    [
        ("libcudnn.so.8", "ImportError: .*`pip install '.\\[cuda\\]'`"),
        ("libcuda.so.1", "ImportError: .*driver"),
        ("libquadmath.so.0", "ImportError: .*`apt install libgomp1 libquadmath0`"),
        ("libopenblas.so.0", "OSError: "),  # MXNet's own error
    ],
)
def test_a_missing_library_is_named_with_its_fix(tmp_path, library, pattern):
    error = f"raise OSError('{library}: cannot open shared object file')"
    text = import_beside(tmp_path, error)
    assert re.match(pattern, text) and library in text


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
    """setup.py and the documentation read the same file."""
    version = gluon_syncbn.__version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (\d.*)$", changes, re.MULTILINE).group(1) == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(
        encoding="utf-8"
    )
