"""Both segmentation scripts end to end with tiny settings, and a user's mistakes."""

import json
import os
import re
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from PIL import Image
from support.helpers import ROOT, output_of, run_tool
from support.mpi import finish, needs_mpi, start

pytest.importorskip("gluoncv", reason="the segmentation scripts need GluonCV")
import predict
import train_segmentation
from filelock import FileLock
from segmentation import run_folder
from segmentation.errors import exit_code

TINY = ["--crop-size", "64", "--train-images", "5", "--val-images", "3"]
TINY += ["--batch-size", "2", "--epochs", "2", "--lr", "0.02"]


def run(script, *arguments):
    """Runs a script on one OpenMP thread.

    MXNet's BilinearResize2D does not repeat its own bits on two.
    """
    command = "env", "OMP_NUM_THREADS=1", sys.executable, ROOT / "scripts" / script
    return run_tool(*command, *arguments, timeout=240)


@pytest.fixture
def run_here(tmp_path, monkeypatch, capsys):
    """Runs a script's work in this process; returns its exit code and errors."""
    monkeypatch.chdir(tmp_path)

    def run_here(work, *arguments):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
        return exit_code(work), capsys.readouterr().err

    return run_here


def log_of(folder):
    return json.loads((folder / "log.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two epochs on the embedded digits."""
    folder = tmp_path_factory.mktemp("trained")
    output = run("train_segmentation.py", *TINY, "--run-dir", folder)
    assert "epoch 2: loss" in output and "predictions.png" in output
    return folder


def test_training_leaves_a_complete_run_folder(trained):
    assert [entry["epoch"] for entry in log_of(trained)] == [1, 2]
    kept = {2, run_folder.best_epoch(log_of(trained))}
    names = {path.name for path in trained.glob("epoch-*")}
    assert names == {f"epoch-000{k}.{x}" for k in kept for x in ("params", "states")}
    for name in "curves.png", "predictions.png":
        assert min(Image.open(trained / name).size) > 300


def test_a_run_that_was_killed_continues_exactly(trained, tmp_path):
    options = *TINY, "--run-dir", tmp_path, "--stop-after", "1"
    assert "epoch 2:" not in run("train_segmentation.py", *options)
    for name in "epoch-0002.params", "epoch-0003.states":
        (tmp_path / name).write_text("half of")
    run("train_segmentation.py", "--resume", tmp_path)
    for name in "epoch-0002.params", "epoch-0002.states":
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == set(os.listdir(trained))


def test_json_is_whole_or_not_there(tmp_path, monkeypatch):
    def die(*arguments):
        raise KeyboardInterrupt

    run_folder.write_json(tmp_path / "log.json", ["before"])
    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        run_folder.write_json(tmp_path / "log.json", ["after"])
    assert log_of(tmp_path) == ["before"]
    assert exit_code(die) == 130


def test_predict_writes_an_overlay(trained, tmp_path, run_here):
    pixels = np.asarray(Image.open(trained / "sample.png"))
    Image.fromarray(np.hstack([pixels, pixels, pixels])[:50]).save("wide.png")
    for image in trained / "sample.png", tmp_path / "wide.png":
        options = "--checkpoint", trained, "--image", image
        assert run_here(predict.main, *options) == (0, "")
        assert min(Image.open(f"{image.stem}_overlay.png").size) > 200


CAMVID = ROOT.parent / "shared" / "data" / "camvid"


@pytest.mark.skipif(not CAMVID.is_dir(), reason=f"{CAMVID} is not a folder")
def test_the_commands_of_the_guide(tmp_path, monkeypatch):
    """As printed, but on fewer images."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "camvid").symlink_to(CAMVID)
    scene = next((CAMVID / "images" / "val").iterdir())
    Image.open(scene).save(tmp_path / "street.jpg")
    guide = (ROOT / "docs" / "guides" / "gluoncv.md").read_text(encoding="utf-8")
    block = re.search(r"```\n(python scripts/train.*?)```", guide, re.S)[1]
    block = block.replace("\\\n", "")
    limits = [*TINY, "--stop-after", "1"]
    for line, more in zip(block.splitlines(), (limits, [], [])):
        _, script, *options = shlex.split(line, comments=True)
        run(Path(script).name, *options, *more)
    assert len(log_of(tmp_path / "runs/folder-fastscnn-syncbn")) == 2
    assert min(Image.open(tmp_path / "overlay.png").size) > 200


def test_mistakes_are_one_sentence_and_leave_a_run_untouched(trained, run_here):
    def refusal(words, *arguments, work=train_segmentation.main):
        status, errors = run_here(work, *arguments)
        errors = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert status == 2 and len(errors) == 1 and words in errors[0], errors

    def predicting(words, run, image="sample.png", output="out.png"):
        options = "--checkpoint", run, "--image", trained / image, "--output", output
        refusal(words, *options, work=predict.main)
        assert not Path(output).exists()

    def content():
        return {path.name: path.read_bytes() for path in trained.iterdir()}

    before = content()
    to_run = *TINY, "--run-dir", trained, "--overwrite"
    refusal("invalid choice: 'unet'", *to_run, "--model", "unet")
    refusal("MXNet sees", *to_run, "--ctx", "gpu", "--num-devices", "99")
    refusal("lower --lr", *to_run, "--lr", "1e38")
    refusal("holds a run already", *TINY, "--run-dir", trained)
    refusal("File name too long", "--run-dir", "x" * 300)
    refusal("has --batch-size 2, not 4", "--resume", trained, "--batch-size", "4")
    refusal("has done 2 of its 2 epochs", "--resume", trained)
    refusal("excludes --run-dir", "--resume", trained, "--overwrite")
    refusal("none holds no epoch of a run", "--resume", "none")
    with FileLock(trained / ".lock"):
        refusal("is in use", *to_run)
    predicting("none holds no epoch of a run", "none")
    predicting("not a readable image", trained, "log.json")
    predicting("but the overlay is a .png", trained, output="x.xyz")
    assert content() == before
    shutil.copytree(trained, "copy")
    settings = Path("copy/settings.json")
    settings.write_text(settings.read_text().replace('"epochs": 2', '"epochs": 3'))
    Path("copy/epoch-0002.states").write_bytes(b"")
    refusal("epoch 2 in copy are damaged", "--resume", "copy")
    for path in Path("copy").glob("*.params"):
        path.write_bytes(path.read_bytes()[:-200])
    predicting("in copy are damaged", "copy")


SCRIPT = str(ROOT / "scripts/train_segmentation.py")
# Prints a checksum of the parameters of each device when they are made and trained.
PROGRAM = f"""
import functools, runpy, sys, zlib
from gluon_syncbn import distributed
import mxnet as mx
from segmentation.engine import Engine

def told(method):
    @functools.wraps(method)
    def call(engine, *arguments):
        result = method(engine, *arguments)
        mx.nd.waitall()
        parameters = engine.net.collect_params().values()
        for replica in zip(*(p.list_data() for p in parameters)):
            values = b"".join(data.asnumpy().tobytes() for data in replica)
            place = f"rank {{distributed.rank()}}, {{replica[0].context}}"
            print(f"{{method.__name__}}, {{place}}: {{zlib.crc32(values):08x}}")
        return result
    return call

Engine.__init__, Engine.train_epoch = told(Engine.__init__), told(Engine.train_epoch)
sys.argv[0] = {SCRIPT!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ONE_STEP = [*TINY, "--train-images", "2", "--epochs", "1"]


@needs_mpi
def test_a_step_of_two_processes_equals_that_of_two_contexts(tmp_path):
    """After one step, because the next ones amplify rounding by thousands."""
    one, two = (tmp_path / name for name in ("one", "two"))
    folder = "--run-dir", one
    output = output_of(PROGRAM, *ONE_STEP, *folder, timeout=240, OMP_NUM_THREADS="1")
    options = "--distributed", *ONE_STEP, "--num-devices", "1", "--run-dir", two
    output += finish(start(2, PROGRAM, *options, init=""))
    assert output.count("epoch 1:") == 2, output
    (expected,), (found,) = log_of(one), log_of(two)
    near = partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
    near(found["train_loss"], expected["train_loss"], err_msg=output)
    expected, found = (mx.nd.load(str(f / "epoch-0001.params")) for f in (one, two))
    assert list(found) == list(expected)
    for name, value in expected.items():
        near(found[name].asnumpy(), value.asnumpy(), err_msg=f"{name}\n{output}")
    with FileLock(two / ".lock"):
        again = start(2, PROGRAM, *options, "--overwrite", init="")
        output = finish(again, status=None)
    assert again.returncode == 2 and "Traceback" not in output, output
    assert output.count("is in use by another process") == 2, output
