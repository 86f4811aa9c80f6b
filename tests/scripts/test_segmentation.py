"""The segmentation scripts: end to end in a tiny size, their parts, and odd input."""

import importlib
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from PIL import Image
from support.helpers import ROOT, run_tool
from support.mpi import finish, needs_mpi, start

pytest.importorskip("gluoncv", reason="the segmentation scripts need GluonCV")
import predict
import train_segmentation
from filelock import FileLock
from segmentation import data, model

TINY = "--crop-size 64 --images 5 --batch-size 2 --epochs 2"
TINY = *TINY.split(), "--lr", "0.02"
SCRIPT = str(ROOT / "scripts/train_segmentation.py")
MAIN = train_segmentation.main


def train(*options):
    return run_tool(sys.executable, SCRIPT, *options, timeout=240)


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run a script's work in this process; return its exit code and its errors."""
    monkeypatch.chdir(tmp_path)

    def call(work, *options):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, options)])
        return model.exit_code(work), capsys.readouterr().err

    return call


def assert_refused(result, words):
    code, text = result
    (error,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert code == 2 and words in error


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Run two epochs on the embedded digits."""
    folder = tmp_path_factory.mktemp("trained")
    output = train(*TINY, "--run-dir", folder)
    assert "epoch 2: train_loss" in output and "predictions.png" in output
    return folder


def test_an_interrupted_run_continues_exactly(trained, tmp_path, call, monkeypatch):
    def save(*arguments, save=model.save):
        save(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model, "save", save)
        code, text = call(MAIN, *TINY, "--run-dir", tmp_path)
        assert code == 130 and "interrupted: --resume continues" in text
    assert call(MAIN, "--resume", tmp_path)[0] == 0
    for name in "run.params", "run.states":
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == set(os.listdir(trained))
    for name in "curves.png", "predictions.png":
        assert min(Image.open(tmp_path / name).size) > 300


def write_folder(root, image, label):
    for split in "train", "val":
        for kind, picture in ("images", image), ("labels", Image.fromarray(label)):
            (root / kind / split).mkdir(parents=True)
            picture.save(root / kind / split / "a.png")
    return "--data-root", root, "--class-names", "A,B"


def test_the_commands_of_the_guide(tmp_path, call):
    """As printed, but on one image and for fewer epochs."""
    pixels = np.random.default_rng(0).integers(0, 256, (80, 90, 3)).astype(np.uint8)
    picture = Image.fromarray(pixels)
    write_folder(tmp_path / "camvid", picture, np.eye(80, 90, dtype=np.uint8))
    picture.save("street.jpg")
    guide = (ROOT / "docs/guides/gluoncv.md").read_text(encoding="utf-8")
    block = re.search(r"```\n(python scripts/train.*?)```", guide, re.S)[1]
    limits = [*TINY, "--epochs", "1"], ["--epochs", "2"], []
    for line, more in zip(block.replace("\\\n", "").splitlines(), limits):
        _, script, *options = shlex.split(line, comments=True)
        work = importlib.import_module(Path(script).stem).main
        assert call(work, *options, *more)[0] == 0
    assert min(Image.open("overlay.png").size) > 200


SMALL, LABEL = Image.new("L", (2, 2)), np.zeros((2, 2), np.uint8)


@pytest.mark.parametrize(
    "words, arguments",
    [
        ("invalid choice: 'unet'", ["--model", "unet"]),
        ("a multiple of 32", ["--crop-size", 50]),
        ("finds no device gpu(98)", ["--ctx", "gpu", "--num-devices", 99]),
        ("Lower --lr", ["--lr", 2e9]),
        ("--class-names must", ["--data-root", "none"]),
        ("none/images/train", ["--data-root", "none", "--class-names", "A,B"]),
        ("has a run", ["--run-dir", "RUN"]),
        ("is finished", ["--resume", "RUN"]),
        ("none/run.json", ["--resume", "none"]),
        ("cannot be read", (Image.new("1", (13500, 13500)), LABEL)),
        ("must have 8 bits", (Image.new("I;16", (2, 2), 500), LABEL)),
        ("label pixels", (SMALL, LABEL + 255)),
        ("below 2, got 7", (SMALL, LABEL + 7)),
        ("the shape (2, 2), got (1, 2)", (SMALL, LABEL[:1])),
    ],
)
def test_odd_input_is_one_sentence(words, arguments, trained, tmp_path, call):
    (tmp_path / "RUN").symlink_to(trained)
    before = {path.name: path.read_bytes() for path in trained.iterdir()}
    if isinstance(arguments, tuple):
        arguments = write_folder(tmp_path, *arguments)
    assert_refused(call(MAIN, *TINY, *arguments), words)
    assert before == {path.name: path.read_bytes() for path in trained.iterdir()}


def test_odd_run_folders_are_one_sentence(trained, tmp_path, call):
    copy = shutil.copytree(trained, tmp_path / "copy")
    resume = MAIN, "--resume", copy, "--epochs", 3
    to_predict = predict.main, "--checkpoint", copy, "--image", "a.png"
    SMALL.save("a.png")
    assert_refused(call(*to_predict, "--output", "x.xyz"), "must end in .png")
    with FileLock(copy / ".lock"):
        assert_refused(call(*resume), "is in use")
    for name, command in ("states", resume), ("params", to_predict):
        path = copy / f"run.{name}"
        path.write_bytes(path.read_bytes()[:-200])
        assert_refused(call(*command), "is damaged")
    (copy / "run.json").write_text('{"epochs": [1], "settings": {}, "classes": []}')
    assert_refused(call(*resume), "run.json")


@needs_mpi
def test_two_processes_train_like_two_contexts(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = *TINY, "--images", "2", "--epochs", "1"  # a single step
    train(*options, "--run-dir", tmp_path / "contexts")
    program = f"import runpy\nrunpy.run_path({SCRIPT!r}, run_name='__main__')"
    options = "--distributed", *options, "--num-devices", "1", "--run-dir", tmp_path
    output = finish(start(2, program, *options, init=""))
    assert output.count("epoch 1:") == 1, output
    found = mx.nd.load(str(tmp_path / "run.params"))
    for name, right in mx.nd.load(str(tmp_path / "contexts/run.params")).items():
        np.testing.assert_allclose(found[name].asnumpy(), right.asnumpy(), 1e-5, 1e-5)


def args(*options):
    return model.Parser().settings(["--crop-size", "64", *map(str, options)])


def test_crops_depend_on_the_epoch_and_keep_image_and_label_together():
    split = data.open_split("train", args())
    first, _ = split[0]
    split.epoch = 1
    assert not np.array_equal(first, split[0][0])
    for index in range(20):
        image, label = split[index]
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


def test_evaluation_by_hand():
    batches = [(None, np.float32([0, 0, 1, 1, -1])), (None, np.float32([0]))]
    found = iter([(3.0, np.array([0, 1, 1, 1, 2])), (2.0, np.array([0]))])
    engine = SimpleNamespace(num_classes=3, predict=lambda *_: next(found))
    expected = {"val_loss": 1, "pixel_accuracy": 0.8, "mean_iou": 2 / 3}
    assert model.Engine.evaluate(engine, batches) == pytest.approx(expected)


def test_the_loss_is_a_sum_over_labelled_pixels():
    """The second output, an auxiliary one, has the weight 0.4."""
    loss, scores = model.NetWithLoss(lambda x: (x, x)), mx.nd.zeros((1, 4, 1, 3))
    with autograd.record():
        total = loss(scores, mx.nd.array([[[0, 3, -1]]]))
    assert total.asscalar() == pytest.approx(1.4 * 2 * np.log(4))


@pytest.mark.parametrize("name", model.MODELS)
def test_every_model_trains(name):
    net = model.NetWithLoss(model.build_model(args("--model", name), 5, [mx.cpu()]))
    with autograd.record():
        loss = net(mx.nd.zeros((2, 3, 64, 64)), mx.nd.zeros((2, 64, 64)))
    loss.backward()
    assert loss.shape == (2,) and np.isfinite(loss.asnumpy()).all()
