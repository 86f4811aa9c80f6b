"""Training under mpirun gives the losses of one process, with one and with two devices."""

import json

import numpy as np
import pytest
from helpers import ROOT, run_python

from mpi import finish, needs_mpi, start

pytest.importorskip("gluoncv", reason="the segmentation scripts need GluonCV")
pytestmark = [needs_mpi, pytest.mark.timeout(280)]

# The scripts as they are, but for Dropout, which draws other numbers on other devices.
PROGRAM = """
import runpy, sys
from mxnet.gluon import nn
nn.Dropout.hybrid_forward = lambda self, F, x: F.identity(x)
sys.argv[0] = {script!r}
runpy.run_path(sys.argv[0], run_name='__main__')
""".format(script=str(ROOT / "scripts/train_segmentation.py"))
# Seven images in batches of three: the last batch has a row for one process only.
TINY = ["--crop-size", "64", "--train-images", "7", "--val-images", "3"]
TINY += ["--batch-size", "3", "--epochs", "2", "--lr", "0.02", "--no-hybridize"]


def log(folder):
    entries = json.loads((folder / "log.json").read_text())
    keys = "images", "train_loss", "val_loss", "pixel_accuracy", "mean_iou"
    return np.array([[entry[key] for key in keys] for entry in entries])


def test_two_processes_train_like_one(tmp_path):
    for devices in (1, 2):
        options = [
            *TINY,
            "--num-devices",
            devices,
            "--run-dir",
            tmp_path / f"{devices}",
        ]
        result = run_python(PROGRAM, *options, timeout=200)
        assert result.returncode == 0, result.stderr
    options = [*TINY, "--num-devices", "1", "--run-dir", tmp_path / "ranks"]
    output = finish(start(2, PROGRAM, "--distributed", *options, init=""))
    assert output.count("epoch 1:") == 1, output
    one, two, ranks = (log(tmp_path / name) for name in ("1", "2", "ranks"))
    assert (one[:, 0] == 7).all() and (ranks[:, 0] == 7).all()
    np.testing.assert_allclose(ranks[:, 1:], one[:, 1:], rtol=2e-3)
    np.testing.assert_allclose(two[:, 1:], one[:, 1:], rtol=2e-3)
    assert (tmp_path / "ranks/last.npz").exists() and (
        tmp_path / "ranks/panel.png"
    ).exists()
