"""Both segmentation scripts end to end with tiny settings, and a user's mistakes."""

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import predict
import pytest
import train_segmentation
from PIL import Image
from segmentation import checkpoint, folder_lock
from segmentation.errors import exit_code
from support.helpers import ROOT, run_python
from support.mpi import finish, needs_mpi, start

pytest.importorskip("gluoncv", reason="the segmentation scripts need GluonCV")
pytestmark = pytest.mark.timeout(280)

TINY = ["--crop-size", "64", "--train-images", "7", "--val-images", "3"]
TINY += ["--batch-size", "4", "--epochs", "2", "--lr", "0.02"]


def command(script, *arguments):
    return [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]


def run(script, *arguments, cwd):
    """Runs a script as a user does."""
    result = subprocess.run(
        command(script, *arguments),
        cwd=cwd, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.fixture
def run_here(tmp_path, monkeypatch, capsys, ctrl_c):
    """Runs a script's work in this process, which has imported MXNet already."""
    monkeypatch.chdir(tmp_path)

    def run_here(work, *arguments):
        monkeypatch.setattr(sys, "argv", [work.__name__, *map(str, arguments)])
        status = exit_code(work)
        return SimpleNamespace(returncode=status, stderr=capsys.readouterr().err)

    return run_here


@pytest.fixture
def train(run_here):
    def train(*arguments):
        result = run_here(train_segmentation.train, *arguments)
        assert result.returncode == 0, result.stderr[-2000:]

    return train


@pytest.fixture
def refusal(run_here):
    """Runs a script that refuses in one sentence, with these words."""

    def refusal(words, *arguments, work=train_segmentation.train):
        result = run_here(work, *arguments)
        assert result.returncode == 2, result.stderr[-2000:]
        errors = [x for x in result.stderr.splitlines() if x.startswith("error: ")]
        assert len(errors) == 1 and "Traceback" not in result.stderr
        assert words in errors[0] and errors[0].endswith("."), errors[0]

    return refusal


def predicting(source, image, output):
    return "--checkpoint", source, "--image", image, "--output", output


def log_of(folder):
    return json.loads((folder / "log.json").read_text())


def arrays(path):
    with np.load(path) as file:
        return {name: file[name] for name in file.files if name != "meta"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two epochs on the embedded digits: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("trained")
    output = run("train_segmentation.py", *TINY, "--run-dir", "run", cwd=folder)
    return folder / "run", output


def test_training_leaves_a_complete_run_folder(trained):
    folder, output = trained
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "log.json", "curves.png", "panel.png"}
    assert names >= {"last.npz", "best.npz", "sample_0.png"}
    assert not [name for name in names if name.endswith(".part")]
    assert [entry["epoch"] for entry in log_of(folder)] == [1, 2]
    for entry in log_of(folder):
        assert np.isfinite(entry["train_loss"]) and 0 <= entry["mean_iou"] <= 1
        assert entry["images"] == 7  # of which the last batch has three
    assert json.loads((folder / "config.json").read_text())["norm"] == "syncbn"
    assert "mIoU" in output and "panel.png" in output and "curves.png" in output
    for name in ("curves.png", "panel.png"):
        assert min(Image.open(folder / name).size) > 300


def test_resume_continues_exactly(trained, tmp_path):
    options = *TINY, "--run-dir", "run", "--stop-after", "1"
    assert "epoch 2:" not in run("train_segmentation.py", *options, cwd=tmp_path)
    run("train_segmentation.py", "--resume", "run", "--workers", "2", cwd=tmp_path)
    straight, resumed = (
        arrays(folder / "last.npz") for folder in (trained[0], tmp_path / "run")
    )
    assert set(straight) == set(resumed)
    for name, value in straight.items():
        np.testing.assert_array_equal(value, resumed[name], err_msg=name)
    assert [entry["epoch"] for entry in log_of(tmp_path / "run")] == [1, 2]


def test_predict_writes_an_overlay(trained, tmp_path, run_here):
    sample, wide = trained[0] / "sample_0.png", tmp_path / "wide.png"
    pixels = np.asarray(Image.open(sample))
    Image.fromarray(np.hstack([pixels, pixels, pixels])[:50]).save(wide)
    output = tmp_path / "overlay.png"
    options = predicting(trained[0] / "best.npz", sample, output)
    assert str(output) in run("predict.py", *options, cwd=tmp_path)
    assert min(Image.open(output).size) > 200
    options = predicting(trained[0], wide, tmp_path / "overlay_of_wide.png")
    assert run_here(predict.predict, *options).returncode == 0
    assert min(Image.open(tmp_path / "overlay_of_wide.png").size) > 200


# ---------------------------------------------------------------- folders of images


@pytest.fixture
def shapes(tmp_path):
    """Bright squares on a dark ground, wider than high, with some unlabelled rows."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 5), ("val", 3)):
        for kind in ("images", "labels"):
            (tmp_path / "data" / kind / split).mkdir(parents=True)
        for k in range(count):
            label = np.zeros((70, 100), np.uint8)
            y, x = rng.integers(0, 40, 2)
            label[y : y + 30, x : x + 30] = 1
            noise = rng.integers(0, 40, (70, 100, 3))
            image = Image.fromarray((label[..., None] * 180 + noise).astype("u1"))
            label[:5] = 7
            image.save(tmp_path / f"data/images/{split}/{k}.jpg")
            Image.fromarray(label).save(tmp_path / f"data/labels/{split}/{k}.png")
    return tmp_path / "data"


def folder_options(root, classes=2, ignore=7):
    options = ["--dataset", "folder", "--data-root", root, "--num-classes", classes]
    return [*options, "--ignore-label", ignore, *TINY, "--epochs", "1"]


def test_folder_of_images(shapes, tmp_path, train, refusal):
    options = [*folder_options(shapes), "--epochs", "2", "--run-dir", "run"]
    train(*options, "--stop-after", "1")
    (entry,) = log_of(tmp_path / "run")
    assert entry["images"] == 5 and len(entry["class_iou"]) == 2
    # A truncated image is found while training goes on, and keeps the checkpoint.
    before = (tmp_path / "run/last.npz").read_bytes()
    image = shapes / "images/train/1.jpg"
    image.write_bytes(image.read_bytes()[: image.stat().st_size // 2])
    refusal("not a readable image", "--resume", "run")
    assert (tmp_path / "run/last.npz").read_bytes() == before


CAMVID = ROOT.parent / "shared" / "data" / "camvid"


@pytest.mark.skipif(not CAMVID.is_dir(), reason=f"{CAMVID} is not a folder")
def test_the_commands_of_the_guide(tmp_path):
    """As printed, but on fewer images."""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "camvid").symlink_to(CAMVID)
    scene = next((CAMVID / "images" / "val").iterdir())
    Image.open(scene).save(tmp_path / "street.jpg")
    guide = (ROOT / "docs" / "guides" / "segmentation.md").read_text(encoding="utf-8")
    block = re.search(r"```\n(python .*?)```", guide, re.S)[1].replace("\\\n", "")
    limits = [*TINY, "--stop-after", "1"]
    for line, more in zip(block.splitlines(), (limits, [], [])):
        _, script, *options = shlex.split(line, comments=True)
        run(Path(script).name, *options, *more, cwd=tmp_path)
    assert len(log_of(tmp_path / "runs/folder-fastscnn-syncbn")) == 2
    assert min(Image.open(tmp_path / "overlay.png").size) > 200


# ---------------------------------------------------------------- a user's mistakes


def test_bad_options_are_one_sentence(shapes, tmp_path, refusal):
    to_run = "--run-dir", "run"
    nowhere = folder_options(tmp_path / "nowhere")
    refusal("There is no folder", *nowhere, *to_run)
    refusal("contains the label 7", *folder_options(shapes, 2, 255), *to_run)
    voc = "--dataset", "voc", "--data-root", tmp_path
    refusal("VOC2012/ImageSets/Segmentation/val.txt", *voc, *to_run)
    refusal("invalid choice: 'unet'", "--model", "unet", *to_run)
    refusal("File name too long", "--run-dir", "x" * 300)
    gpus = "--ctx", "gpu", "--num-devices", "99", "--batch-size", "99"
    refusal("MXNet sees", *gpus, *to_run)
    assert not (tmp_path / "run/last.npz").exists()


def test_mistakes_around_a_run_leave_it_untouched(trained, tmp_path, refusal):
    folder, _ = trained

    def content():
        files = [path for path in folder.iterdir() if path.name != ".lock"]
        return {path.name: path.read_bytes() for path in files}

    before = content()
    refusal("holds a run already", *TINY, "--run-dir", folder)
    refusal("has --batch-size 4, not 2", "--resume", folder, "--batch-size", "2")
    refusal("has done all its 2 epochs", "--resume", folder)
    refusal("There is no checkpoint", "--resume", tmp_path / "none")
    copy = shutil.copytree(folder, tmp_path / "copy")
    state = checkpoint.load(copy)
    state.momenta.popitem()
    checkpoint.save(copy / "last.npz", replace(state, epoch=1, log=state.log[:1]))
    refusal("optimizer state does not fit the net", "--resume", copy)
    refusal("holds a run already", "--resume", copy, "--run-dir", folder)
    with folder_lock.held(folder):
        refusal("is in use by process", "--resume", folder)
    assert content() == before


def test_an_interrupt_leaves_whole_checkpoints(tmp_path, train, ctrl_c):
    options = *TINY, "--epochs", "500", "--run-dir", "run"
    with subprocess.Popen(
        command("train_segmentation.py", *options),
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            while not process.stdout.readline().startswith("epoch 1:"):
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            errors = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 130 and "Traceback" not in errors, errors[-2000:]
    assert not list((tmp_path / "run").glob("*.part"))
    continued = r"are whole; `python (\S*train_segmentation.py) --resume run` continues"
    assert Path(re.search(continued, errors)[1]).exists()
    done = len(log_of(tmp_path / "run"))
    train("--resume", "run", "--stop-after", str(done + 1))


@pytest.mark.parametrize(
    "source, image, output, words",
    [
        ("none.npz", "sample.png", "out.png", "There is no checkpoint"),
        ("run", "text.png", "out.png", "not a readable image"),
        ("run", "sample.png", "x.xyz", "--output is x.xyz, but the overlay is a .png"),
    ],
)
def test_predicting_with_bad_input_is_one_sentence(
    trained, run_here, refusal, source, image, output, words
):
    Path("run").symlink_to(trained[0])
    shutil.copy(trained[0] / "sample_0.png", "sample.png")
    Path("text.png").write_text("no image")
    refusal(words, *predicting(source, image, output), work=predict.predict)
    assert not Path(output).exists()


# ---------------------------------------------------------------- several processes

# The script as it is, but for Dropout, which draws other numbers on other devices.
PROGRAM = """
import runpy, sys
from mxnet.gluon import nn
nn.Dropout.hybrid_forward = lambda self, F, x: F.identity(x)
sys.argv[0] = {script!r}
runpy.run_path(sys.argv[0], run_name='__main__')
""".format(script=str(ROOT / "scripts/train_segmentation.py"))
IMPERATIVE = [*TINY, "--no-hybridize"]


def figures(folder):
    keys = "images", "train_loss", "val_loss", "pixel_accuracy", "mean_iou"
    return np.array([[entry[key] for key in keys] for entry in log_of(folder)])


@needs_mpi
def test_two_processes_train_like_one(tmp_path):
    for devices in (1, 2):
        run_dir = tmp_path / str(devices)
        options = [*IMPERATIVE, "--num-devices", devices, "--run-dir", run_dir]
        result = run_python(PROGRAM, *options, timeout=200)
        assert result.returncode == 0, result.stderr
    options = [*IMPERATIVE, "--num-devices", "1", "--run-dir", tmp_path / "ranks"]
    output = finish(start(2, PROGRAM, "--distributed", *options, init=""))
    assert output.count("epoch 1:") == 1, output
    one, two, ranks = (figures(tmp_path / name) for name in ("1", "2", "ranks"))
    assert (ranks[:, 0] == 7).all()
    np.testing.assert_allclose(ranks, two, rtol=1e-5)
    # Later epochs of one device differ in float32, because FastSCNN normalizes one
    # number per image; test_distributed.py compares a net without that in float64.
    np.testing.assert_allclose(ranks[0], one[0], rtol=1e-5)
    names = {path.name for path in (tmp_path / "ranks").iterdir()}
    assert names >= {"last.npz", "best.npz", "panel.png", "curves.png"}


@needs_mpi
def test_ranks_are_refused_a_folder_in_use_in_one_sentence(tmp_path):
    with folder_lock.held(tmp_path / "run"):
        options = [*IMPERATIVE, "--num-devices", "1", "--run-dir", tmp_path / "run"]
        process = start(2, PROGRAM, "--distributed", *options, init="")
        output = finish(process, status=None)
    assert process.returncode == 2, output
    errors = [line for line in output.splitlines() if "error" in line]
    assert len(errors) == 1 and "is in use by process" in errors[0], output
    assert "Traceback" not in output
