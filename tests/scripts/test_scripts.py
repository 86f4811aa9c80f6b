"""Both segmentation scripts end to end with tiny settings, and a user's mistakes."""

import json
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import predict
import pytest
import train_segmentation
from PIL import Image
from segmentation import checkpoint
from segmentation.errors import exit_code
from support import camvid
from support.helpers import ROOT

pytest.importorskip("gluoncv", reason="the segmentation scripts need GluonCV")
pytestmark = pytest.mark.timeout(280)

TINY = ["--crop-size", "64", "--train-images", "7", "--val-images", "3"]
TINY += ["--batch-size", "4", "--epochs", "2", "--lr", "0.02"]


def command(script, *arguments):
    return [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]


def run(script, *arguments, cwd):
    return subprocess.run(
        command(script, *arguments),
        cwd=cwd, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.fixture
def run_here(tmp_path, monkeypatch, capsys, ctrl_c):
    """Runs a script's work in this process, which has imported MXNet already."""
    monkeypatch.chdir(tmp_path)

    def run_here(work, *arguments):
        monkeypatch.setattr(sys, "argv", [work.__name__, *map(str, arguments)])
        status = exit_code(work)
        return SimpleNamespace(returncode=status, stderr=capsys.readouterr().err)

    return run_here


def predicting(source, image, output):
    return "--checkpoint", source, "--image", image, "--output", output


@contextmanager
def training(folder):
    """A process that trains for long, and that has done its first epoch."""
    options = *TINY, "--epochs", "500", "--run-dir", "run"
    with subprocess.Popen(
        command("train_segmentation.py", *options),
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            while not process.stdout.readline().startswith("epoch 1:"):
                assert process.poll() is None
            yield process
        finally:
            process.kill()


def train(folder, *arguments):
    result = run("train_segmentation.py", *arguments, cwd=folder)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def assert_one_sentence(result, words):
    assert result.returncode == 2, result.stderr[-2000:]
    errors = [x for x in result.stderr.splitlines() if x.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in result.stderr, result.stderr[-2000:]
    assert words in errors[0] and errors[0].endswith("."), errors[0]


def arrays(path):
    with np.load(path) as file:
        return {name: file[name] for name in file.files if name != "meta"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two epochs on the embedded digits: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("trained")
    output = train(folder, *TINY, "--run-dir", "run")
    return folder / "run", output


@pytest.fixture(scope="module")
def after_an_epoch(tmp_path_factory):
    """The same run, stopped after one of the two epochs: its folder."""
    folder = tmp_path_factory.mktemp("after_an_epoch")
    output = train(folder, *TINY, "--run-dir", "run", "--stop-after", "1")
    assert "epoch 2:" not in output
    return folder / "run"


@pytest.fixture
def stopped(after_an_epoch, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(after_an_epoch, tmp_path / "run"))


def test_training_leaves_a_complete_run_folder(trained):
    folder, output = trained
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "log.json", "curves.png", "panel.png"}
    assert names >= {"last.npz", "best.npz", "sample_0.png"}
    assert not [name for name in names if name.endswith(".part")]
    log = json.loads((folder / "log.json").read_text())
    assert [entry["epoch"] for entry in log] == [1, 2]
    for entry in log:
        assert np.isfinite(entry["train_loss"]) and 0 <= entry["mean_iou"] <= 1
    assert json.loads((folder / "config.json").read_text())["norm"] == "syncbn"
    assert "mIoU" in output and "panel.png" in output and "curves.png" in output
    for name in ("curves.png", "panel.png"):
        assert min(Image.open(folder / name).size) > 300


def test_the_uneven_last_batch_is_trained_on(trained):
    log = json.loads((trained[0] / "log.json").read_text())
    assert [entry["images"] for entry in log] == [7, 7]


def test_resume_continues_exactly(trained, stopped, tmp_path):
    train(tmp_path, "--resume", "run")
    straight, resumed = (
        arrays(folder / "last.npz") for folder in (trained[0], stopped)
    )
    assert set(straight) == set(resumed)
    for name, value in straight.items():
        np.testing.assert_array_equal(value, resumed[name], err_msg=name)
    log = json.loads((stopped / "log.json").read_text())
    assert [entry["epoch"] for entry in log] == [1, 2]


def test_predict_writes_an_overlay(trained, tmp_path):
    image = tmp_path / "wide.png"
    sample = np.asarray(Image.open(trained[0] / "sample_0.png"))
    Image.fromarray(np.hstack([sample, sample, sample])[:50]).save(image)
    for number, source in enumerate([trained[0] / "sample_0.png", image]):
        output = tmp_path / f"overlay_{number}.png"
        options = predicting(trained[0] / "best.npz", source, output)
        result = run("predict.py", *options, cwd=tmp_path)
        assert result.returncode == 0, result.stderr[-2000:]
        assert min(Image.open(output).size) > 200
        assert str(output) in result.stdout


@pytest.mark.parametrize("arguments", [["--norm", "bn"], ["--no-hybridize"]])
def test_other_modes_train_too(tmp_path, arguments):
    train(tmp_path, *TINY, "--epochs", "1", "--run-dir", "run", *arguments)
    assert (tmp_path / "run/last.npz").exists()


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


def test_folder_of_images(shapes, tmp_path):
    train(tmp_path, *folder_options(shapes), "--run-dir", "run")
    log = json.loads((tmp_path / "run/log.json").read_text())
    assert log[0]["images"] == 5 and len(log[0]["class_iou"]) == 2


@camvid.needs_camvid
def test_camvid(tmp_path):
    train(tmp_path, *folder_options(camvid.FOLDER, 11, 11), "--run-dir", "run")
    log = json.loads((tmp_path / "run/log.json").read_text())
    assert log[0]["images"] == 7 and len(log[0]["class_iou"]) == 11


# ---------------------------------------------------------------- a user's mistakes


def test_bad_data_is_one_sentence(shapes, tmp_path, run_here):
    def start(*options):
        return run_here(train_segmentation.train, *options, "--run-dir", "run")

    gone = folder_options(tmp_path / "nowhere")
    assert_one_sentence(start(*gone), "There is no folder")
    assert_one_sentence(start(*folder_options(shapes, 2, 255)), "contains the label 7")
    (shapes / "images/train/1.jpg").write_bytes(b"no image")
    assert_one_sentence(start(*folder_options(shapes)), "not a readable image")
    voc = ["--dataset", "voc", "--data-root", tmp_path]
    assert_one_sentence(start(*voc), "VOC2012/ImageSets/Segmentation/val.txt")
    assert not (tmp_path / "run/last.npz").exists()


def test_a_truncated_image_found_while_training_keeps_the_checkpoint(shapes, tmp_path):
    options = [*folder_options(shapes), "--epochs", "2", "--run-dir", "run"]
    train(tmp_path, *options, "--stop-after", "1")
    before = (tmp_path / "run/last.npz").read_bytes()
    image = shapes / "images/train/1.jpg"
    whole = image.read_bytes()
    image.write_bytes(whole[: len(whole) // 2])
    result = run("train_segmentation.py", "--resume", "run", cwd=tmp_path)
    assert_one_sentence(result, "not a readable image")
    assert (tmp_path / "run/last.npz").read_bytes() == before


def test_mistakes_around_a_run_leave_it_untouched(trained, tmp_path):
    folder, _ = trained

    def content():
        files = [path for path in folder.iterdir() if path.name != ".lock"]
        return {path.name: path.read_bytes() for path in files}

    def start(*options):
        return run("train_segmentation.py", *options, cwd=tmp_path)

    before = content()

    assert_one_sentence(start(*TINY, "--run-dir", folder), "holds a run already")
    changed = ["--resume", folder, "--batch-size", "2"]
    assert_one_sentence(start(*changed), "has --batch-size 4, not 2")
    changed = ["--resume", folder, "--model", "fcn"]
    assert_one_sentence(start(*changed), "has --model fastscnn, not fcn")
    assert_one_sentence(start("--resume", folder), "has done all its 2 epochs")
    assert_one_sentence(start("--resume", tmp_path / "none"), "There is no checkpoint")
    assert content() == before


def test_a_bad_command_line_is_one_sentence(tmp_path):
    for options, words in [
        (["--model", "unet"], "invalid choice: 'unet'"),
        (["--epochs", "many"], "invalid int value"),
        (["--colour", "red"], "unrecognized arguments"),
        (["--run-dir", "x" * 300], "File name too long"),
        (["--resume", "x" * 300], "File name too long"),
    ]:
        result = run("train_segmentation.py", *options, cwd=tmp_path)
        assert_one_sentence(result, words)


def test_an_interrupt_leaves_whole_checkpoints(tmp_path, ctrl_c):
    with training(tmp_path) as process:
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in errors, errors[-2000:]
    assert not list((tmp_path / "run").glob("*.part"))
    command = r"are whole; `python (\S*train_segmentation.py) --resume run` continues"
    assert Path(re.search(command, errors)[1]).exists()
    train(tmp_path, "--resume", "run", "--stop-after", "3")


def test_a_folder_in_use_is_refused_until_its_process_ends(tmp_path):
    output = tmp_path / "overlay.png"
    with training(tmp_path) as process:
        for options in (
            ["--resume", "run/best.npz"],
            [*TINY, "--run-dir", "run", "--overwrite"],
        ):
            result = run("train_segmentation.py", *options, cwd=tmp_path)
            assert_one_sentence(result, f"is in use by process {process.pid}:")
        options = predicting("run", "run/sample_0.png", output)
        result = run("predict.py", *options, cwd=tmp_path)
        assert result.returncode == 0 and output.exists(), result.stderr
        assert process.poll() is None
    done = len(json.loads((tmp_path / "run/log.json").read_text()))
    train(tmp_path, "--resume", "run", "--stop-after", str(done + 2))


def test_resuming_into_the_folder_of_another_run_is_refused(trained, stopped, tmp_path):
    options = ["--resume", stopped, "--run-dir", trained[0]]
    result = run("train_segmentation.py", *options, cwd=tmp_path)
    assert_one_sentence(result, "holds a run already")


def test_an_optimizers_state_of_another_net_is_one_sentence(stopped, run_here):
    state = checkpoint.load(stopped)
    state.momenta.popitem()
    checkpoint.save(stopped / "last.npz", state)
    result = run_here(train_segmentation.train, "--resume", stopped)
    assert_one_sentence(result, "optimizer state does not fit the net")


def test_gpus_that_are_not_there_are_one_sentence(tmp_path):
    import mxnet as mx

    try:
        there = mx.context.num_gpus()
    except mx.MXNetError:
        there = 0
    options = [*TINY, "--ctx", "gpu", "--num-devices", str(there + 1)]
    options += ["--batch-size", str(there + 1)]
    result = run("train_segmentation.py", *options, "--run-dir", "run", cwd=tmp_path)
    assert_one_sentence(result, "MXNet sees")


def test_predicting_with_bad_input_is_one_sentence(trained, tmp_path, run_here):
    folder, _ = trained
    sample = folder / "sample_0.png"
    text, other = tmp_path / "text.png", tmp_path / "other.npz"
    text.write_text("no image")
    state = checkpoint.load(folder)
    state.config = replace(state.config, model="icnet")
    checkpoint.save(other, state)
    for source, image, words in [
        (text, sample, "not a whole checkpoint"),
        (tmp_path / "none.npz", sample, "There is no checkpoint"),
        (other, sample, "of another model"),
        (folder, text, "not a readable image"),
        (folder, tmp_path / "none.png", "not a readable image"),
    ]:
        options = predicting(source, image, tmp_path / "out.png")
        assert_one_sentence(run_here(predict.predict, *options), words)
    assert not (tmp_path / "out.png").exists()


def test_an_output_that_is_no_png_is_one_sentence(trained, tmp_path):
    for name in "x.xyz", "x", ".png":
        options = predicting(trained[0], trained[0] / "sample_0.png", name)
        result = run("predict.py", *options, cwd=tmp_path)
        assert_one_sentence(result, f"--output is {name}, but the overlay is a .png")
    assert not list(tmp_path.iterdir())
