"""Run every program in examples/ briefly, and check its output and its files."""

import re
import sys

import pytest
from support.helpers import RESTORE_NUMPY_NAMES, ROOT, run_tool
from support.mpi import launcher, needs_mpi

EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Run programs in a temporary folder, with the package of this checkout."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


def run(name, *arguments, before=()):
    program = sys.executable, EXAMPLES / f"{name}.py"
    return run_tool(*before, *program, *arguments, timeout=240)


def last_number(output):
    return float(re.findall(r"(\d\.\d+)\n", output)[-1])


def differences(output):
    return [float(number) for number in re.findall(r"differs .*?([\d.e+-]+)\n", output)]


@pytest.mark.parametrize("name", ["digits", "own_loop"])
def test_the_classifiers_learn_digits(name):
    output = run(name, "--epochs", 3)
    assert output.count("epoch ") == 3
    assert last_number(output) > 0.9


@needs_mpi
def test_several_processes_learn_digits(tmp_path):
    output = run("several_processes", "--epochs", 3, before=launcher(2))
    assert output.count("epoch ") == 3  # only rank 0 prints
    assert last_number(output) > 0.9
    assert (tmp_path / "digits.params").exists()


@needs_mpi
def test_without_mpirun_a_warning_says_that_the_process_trains_alone():
    output = run("several_processes", "--epochs", 1)
    assert output.count("UserWarning: this process trains alone") == 1


def test_what_is_deployed_needs_no_gluon_syncbn(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "folder"
    assert max(differences(run("deploy", folder))) < 1e-5
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH")
    program = RESTORE_NUMPY_NAMES + (
        "import sys; sys.modules['gluon_syncbn'] = None; import mxnet as mx;"
        "net = mx.gluon.SymbolBlock.imports("
        "'digits-symbol.json', ['data'], 'digits-0000.params');"
        "print(net(mx.nd.ones((2, 1, 8, 8))).shape)"
    )
    assert "(2, 10)" in run_tool(sys.executable, "-c", program, timeout=60)


def test_padded_sequences_are_normalized_like_unpadded_ones():
    found = differences(run("padded_sequences"))
    assert len(found) == 2 and max(found) < 1e-12
