"""Scripts run in several processes: training like one process, and a benchmark."""

import json
import sys

import numpy as np
import pytest
from segmentation import folder_lock
from support.helpers import ROOT, run_python, run_tool
from support.mpi import finish, needs_mpi, start

pytestmark = [needs_mpi, pytest.mark.timeout(280)]

# The script as it is, but for Dropout, which draws other numbers on other devices.
PROGRAM = """
import runpy, sys
from mxnet.gluon import nn
nn.Dropout.hybrid_forward = lambda self, F, x: F.identity(x)
sys.argv[0] = {script!r}
runpy.run_path(sys.argv[0], run_name='__main__')
""".format(script=str(ROOT / "scripts/train_segmentation.py"))
# Seven images in batches of four: the shards of the last batch are uneven.
TINY = ["--crop-size", "64", "--train-images", "7", "--val-images", "3"]
TINY += ["--batch-size", "4", "--epochs", "2", "--lr", "0.02", "--no-hybridize"]


def log(folder):
    entries = json.loads((folder / "log.json").read_text())
    keys = "images", "train_loss", "val_loss", "pixel_accuracy", "mean_iou"
    return np.array([[entry[key] for key in keys] for entry in entries])


def test_two_processes_train_like_one(tmp_path):
    pytest.importorskip("gluoncv", reason="the segmentation scripts need GluonCV")
    for devices in (1, 2):
        run_dir = tmp_path / str(devices)
        options = [*TINY, "--num-devices", devices, "--run-dir", run_dir]
        result = run_python(PROGRAM, *options, timeout=200)
        assert result.returncode == 0, result.stderr
    options = [*TINY, "--num-devices", "1", "--run-dir", tmp_path / "ranks"]
    output = finish(start(2, PROGRAM, "--distributed", *options, init=""))
    assert output.count("epoch 1:") == 1, output
    one, two, ranks = (log(tmp_path / name) for name in ("1", "2", "ranks"))
    assert (ranks[:, 0] == 7).all()
    np.testing.assert_allclose(ranks, two, rtol=1e-5)
    # Later epochs of one device differ in float32, because FastSCNN normalizes one
    # number per image; test_distributed.py compares a net without that in float64.
    np.testing.assert_allclose(ranks[0], one[0], rtol=1e-5)
    names = {path.name for path in (tmp_path / "ranks").iterdir()}
    assert names >= {"last.npz", "best.npz", "panel.png", "curves.png"}


def test_ranks_are_refused_a_folder_in_use_in_one_sentence(tmp_path):
    with folder_lock.held(tmp_path / "run"):
        options = [*TINY, "--num-devices", "1", "--run-dir", tmp_path / "run"]
        process = start(2, PROGRAM, "--distributed", *options, init="")
        output = finish(process, status=None)
    assert process.returncode == 2, output
    errors = [line for line in output.splitlines() if "error" in line]
    assert len(errors) == 1 and "is in use by process" in errors[0], output
    assert "Traceback" not in output


@pytest.mark.full
def test_benchmark_of_exchanges(tmp_path):
    program = ROOT / "scripts/benchmarks/benchmark_exchange.py"
    output = tmp_path / "result.json"
    run_tool(sys.executable, program, "--repetitions", 20, "--output", output)
    result = json.loads(output.read_text())
    assert {row["processes"] for row in result["processes"]} == {1, 2, 3, 4}
