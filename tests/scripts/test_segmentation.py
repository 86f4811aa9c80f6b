"""The segmentation scripts: whole tiny runs, single functions, and odd input."""

import importlib
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from PIL import Image
from support.helpers import ROOT, differentiate, run_tool
from support.mpi import finish, needs_mpi, start

pytest.importorskip("gluoncv", reason="the segmentation scripts need GluonCV")
from filelock import FileLock
from segmentation import data, model
from train_segmentation import __file__ as SCRIPT
from train_segmentation import main

TINY = "--crop-size 64 --images 5 --batch-size 2 --epochs 2 --lr 0.02".split()


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run a script's `main` in this process; check the exit code, return stderr."""
    monkeypatch.chdir(tmp_path)

    def call(code, script_main, *options):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, options)])
        assert model.exit_code(script_main) == code
        return capsys.readouterr().err

    return call


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    output = run_tool(sys.executable, SCRIPT, *TINY, "--run-dir", folder)
    assert "epoch 2: train_loss" in output and len(os.listdir(folder)) == 6
    return folder


def test_an_interrupted_run_continues_exactly(trained, tmp_path, call, monkeypatch):
    def save(*arguments, save=model.save):
        save(*arguments)
        monkeypatch.setattr(model, "save", save)
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "save", save)
    assert "--resume continues" in call(130, main, *TINY, "--run-dir", tmp_path)
    with FileLock(tmp_path / ".lock"):
        assert "is in use" in call(2, main, "--resume", tmp_path)
    call(0, main, "--resume", tmp_path)
    for name in "run-2.params", "run-2.states":
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == set(os.listdir(trained))


def write_folder(root, image, label):
    for split in "train", "val":
        for kind, picture in ("images", image), ("labels", Image.fromarray(label)):
            (root / kind / split).mkdir(parents=True)
            picture.save(root / kind / split / "a.png")
    return "--data-root", root, "--class-names", "A,B"


def test_the_commands_of_the_guide(tmp_path, call):
    """They run as the guide prints them, with options that make training short."""
    pixels = np.random.default_rng(0).integers(0, 256, (80, 90, 3)).astype(np.uint8)
    picture = Image.fromarray(pixels)
    write_folder(tmp_path / "camvid", picture, np.eye(80, 90, dtype=np.uint8))
    picture.save("street.jpg")
    guide = (ROOT / "docs/guides/gluoncv.md").read_text(encoding="utf-8")
    block = re.search(r"```\n(python scripts/train.*?)```", guide, re.S)[1]
    limits = [*TINY, "--epochs", "1"], ["--epochs", "2"], []
    for line, more in zip(block.replace("\\\n", "").splitlines(), limits):
        _, script, *options = shlex.split(line, comments=True)
        script_main = importlib.import_module(Path(script).stem).main
        call(0, script_main, *options, *more)
    assert min(Image.open("overlay.png").size) > 200
    assert "must end in .png" in call(2, script_main, *options, "--output", "x.xyz")


SMALL, LABEL = Image.new("L", (2, 2)), np.zeros((2, 2), np.uint8)


@pytest.mark.parametrize(
    "words, arguments",
    [
        ("a multiple of 32", ["--crop-size", 50]),
        ("finds no device gpu(98)", ["--ctx", "gpu", "--num-devices", 99]),
        ("Lower --lr", ["--lr", 2e9]),
        ("none/images/train", ["--data-root", "none", "--class-names", "A,B"]),
        ("has a run", ["--run-dir", "RUN"]),
        ("is finished", ["--resume", "RUN"]),
        ("run.json", "run.json"),
        ("is damaged", "run-2.params"),
        ("is damaged", "run-2.states"),
        ("cannot be read", (Image.new("1", (13500, 13500)), LABEL)),
        ("must have 8 bits", (Image.new("I;16", (2, 2), 500), LABEL)),
        ("--ignore-label", (SMALL, LABEL + 255)),
        ("below 2, got 7", (SMALL, LABEL + 7)),
        ("the shape (2, 2), got (1, 2)", (SMALL, LABEL[:1])),
    ],
)
def test_odd_input_is_an_error(words, arguments, trained, tmp_path, call):
    """The arguments are options, an image with its label, or a file that is cut off."""
    run = shutil.copytree(trained, tmp_path / "RUN")
    if isinstance(arguments, tuple):
        arguments = write_folder(tmp_path, *arguments)
    elif isinstance(arguments, str):
        (run / arguments).write_bytes((run / arguments).read_bytes()[:-200])
        arguments = ["--resume", run, "--epochs", 3]
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    assert words in call(2, main, *TINY, *arguments)
    assert before == {path.name: path.read_bytes() for path in run.iterdir()}


@needs_mpi
def test_two_processes_train_like_two_contexts(tmp_path, monkeypatch, call):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = *TINY, "--images", "2", "--epochs", "1"  # a single step
    call(0, main, *options, "--run-dir", tmp_path / "contexts")
    program = f"import runpy\nrunpy.run_path({SCRIPT!r}, run_name='__main__')"
    options = "--distributed", *options, "--num-devices", "1", "--run-dir", tmp_path
    assert finish(start(2, program, *options, init="")).count("epoch 1:") == 1
    found = mx.nd.load(str(tmp_path / "run-1.params"))
    for name, right in mx.nd.load(str(tmp_path / "contexts/run-1.params")).items():
        np.testing.assert_allclose(found[name].asnumpy(), right.asnumpy(), 1e-5, 1e-5)


def args(*options):
    return model.Parser().settings(["--crop-size", "64", *map(str, options)])


def test_crops_depend_on_the_epoch_and_keep_image_and_label_together():
    split = data.open_split("train", args())
    first, _ = split[0]
    for split.epoch in range(1, 20):
        image, label = split[0]
        assert not np.array_equal(image, first)
        brightest = image.max(axis=2).astype(float)
        assert brightest[label > 0].mean() > brightest[label == 0].mean() + 50


def test_folders(tmp_path):
    options = write_folder(tmp_path, Image.new("L", (4, 1)), np.uint8([[0, 1, 2, 255]]))
    split = data.open_split("val", args(*options, "--ignore-label", 2))
    assert split.load(split.items[0])[1].tolist() == [[0, 1, -1, -1]]
    (tmp_path / "ImageSets/Segmentation").mkdir(parents=True)
    (tmp_path / "ImageSets/Segmentation/val.txt").write_text("x\n")
    pair = tmp_path / "JPEGImages/x.jpg", tmp_path / "SegmentationClass/x.png"
    assert data.open_split("val", args(*options)).items == [pair]


def test_loss_and_scores_by_hand():
    """The softmax of a predicted class is 1/2, and of the two other classes 1/4."""
    truth, predicted = [0, 0, 1, 1, -1, 0], [0, 1, 1, 1, 2, 0]
    x = mx.nd.array(np.log(1 + np.eye(3)[:, predicted]).reshape(1, 3, 6, 1))
    y = np.float32(truth).reshape(1, 6, 1)
    net = model.NetWithLoss(lambda x: (x, x))
    with autograd.record():  # the second output, an auxiliary one, weighs 0.4
        assert net(x, mx.nd.array(y)).asscalar() == pytest.approx(8.4 * np.log(2), 1e-5)
    engine = model.Engine.__new__(model.Engine)
    engine.num_classes, engine.parallel = 3, lambda x, y: net(x, mx.nd.array(y))
    expected = {"val_loss": 1.2 * np.log(2), "pixel_accuracy": 0.8, "mean_iou": 2 / 3}
    assert engine.evaluate([(x, y)] * 2) == pytest.approx(expected, 1e-5)


@pytest.mark.parametrize("name", model.MODELS)
def test_every_model_trains(name):
    net = model.NetWithLoss(model.build_model(args("--model", name), 5, [mx.cpu()]))
    loss = differentiate(net, mx.nd.zeros((2, 3, 64, 64)), mx.nd.zeros((2, 64, 64)))
    assert loss.shape == (2,) and np.isfinite(loss.asnumpy()).all()
