"""The segmentation scripts: end to end in a tiny size, their parts, and odd input."""

import functools
import json
import os
import re
import resource
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
from scipy.special import log_softmax
from support.helpers import ROOT, run_tool
from support.mpi import finish, needs_mpi, start

pytest.importorskip("gluoncv", reason="the segmentation scripts need GluonCV")
import predict
import train_segmentation
from filelock import FileLock
from segmentation import data, model

TINY = "--crop-size 64 --images 5 --batch-size 2 --epochs 2"
TINY = *TINY.split(), "--lr", "0.02"
CAMVID = ROOT.parent / "shared" / "data" / "camvid"
SCRIPT = str(ROOT / "scripts/train_segmentation.py")


def run(script, *arguments):
    return run_tool(sys.executable, ROOT / "scripts" / script, *arguments, timeout=240)


@pytest.fixture
def refuse(monkeypatch, capsys, tmp_path):
    """Run a script's work in this process, which ends with a code and a sentence."""
    monkeypatch.chdir(tmp_path)

    def refuse(words, *options, work=train_segmentation.main, code=2, start="error: "):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, options)])
        assert model.exit_code(work) == code
        lines = capsys.readouterr().err.splitlines()
        (error,) = [line for line in lines if line.startswith(start)]
        assert words in error

    return refuse


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Run two epochs on the embedded digits."""
    folder = tmp_path_factory.mktemp("trained")
    output = run("train_segmentation.py", *TINY, "--run-dir", folder)
    assert "epoch 2: train_loss" in output and "predictions.png" in output
    return folder


def test_an_interrupted_run_continues_exactly(trained, tmp_path, refuse, monkeypatch):
    def save(*arguments, save=model.save):
        save(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model, "save", save)
        options = *TINY, "--run-dir", tmp_path
        refuse("--resume continues", *options, code=130, start="interrupted")
    run("train_segmentation.py", "--resume", tmp_path)
    for name in "run.params", "run.states":
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == set(os.listdir(trained))
    for name in "curves.png", "predictions.png":
        assert min(Image.open(tmp_path / name).size) > 300


@pytest.mark.skipif(not CAMVID.is_dir(), reason=f"{CAMVID} is not a folder")
def test_the_commands_of_the_guide(tmp_path, monkeypatch):
    """As printed, but on fewer images and for fewer epochs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "camvid").symlink_to(CAMVID)
    shutil.copy(next((CAMVID / "images" / "val").iterdir()), "street.jpg")
    guide = (ROOT / "docs/guides/gluoncv.md").read_text(encoding="utf-8")
    block = re.search(r"```\n(python scripts/train.*?)```", guide, re.S)[1]
    limits = [*TINY, "--epochs", "1"], ["--epochs", "2"], []
    for line, more in zip(block.replace("\\\n", "").splitlines(), limits):
        _, script, *options = shlex.split(line, comments=True)
        run(Path(script).name, *options, *more)
    assert min(Image.open("overlay.png").size) > 200


def write_folder(root, image, label):
    for split in "train", "val":
        for kind, picture in ("images", image), ("labels", Image.fromarray(label)):
            (root / kind / split).mkdir(parents=True)
            picture.save(root / kind / split / "a.png")
    return "--data-root", root, "--class-names", "A,B"


SMALL, LABEL = Image.new("L", (2, 2)), np.zeros((2, 2), np.uint8)


@pytest.mark.parametrize(
    "words, arguments",
    [
        ("invalid choice: 'unet'", ["--model", "unet"]),
        ("a multiple of 32", ["--crop-size", 50]),
        ("epochs must be at least 1", ["--epochs", 0]),
        ("finds no device gpu(98)", ["--ctx", "gpu", "--num-devices", 99]),
        ("Lower --lr", ["--lr", 2e9]),
        ("--class-names must", ["--data-root", "none"]),
        ("none/images/train", ["--data-root", "none", "--class-names", "A,B"]),
        ("has a run", ["--run-dir", "RUN"]),
        ("is finished", ["--resume", "RUN"]),
        ("none/run.json", ["--resume", "none"]),
        ("File name too long", ["--run-dir", "x" * 300]),
        ("cannot be read", (Image.new("1", (13500, 13500)), LABEL)),
        ("must have 8 bits", (Image.new("I;16", (2, 2), 500), LABEL)),
        ("label pixels", (SMALL, LABEL + 255)),
        ("below 2, got 7", (SMALL, LABEL + 7)),
        ("the shape (2, 2), got (1, 2)", (SMALL, LABEL[:1])),
    ],
)
def test_odd_input_is_one_sentence(words, arguments, trained, tmp_path, refuse):
    (tmp_path / "RUN").symlink_to(trained)
    before = {path.name: path.read_bytes() for path in trained.iterdir()}
    if isinstance(arguments, tuple):
        arguments = write_folder(tmp_path, *arguments)
    refuse(words, *TINY, *arguments)
    assert before == {path.name: path.read_bytes() for path in trained.iterdir()}


def test_odd_run_folders_are_one_sentence(trained, tmp_path, refuse):
    copy = shutil.copytree(trained, tmp_path / "copy")
    resume = "--resume", copy, "--epochs", 3
    to_predict = functools.partial(refuse, work=predict.main)
    SMALL.save("a.png")
    image = "--checkpoint", copy, "--image", "a.png"
    to_predict("must end in .png", *image, "--output", "x.xyz")
    with FileLock(copy / ".lock"):
        refuse("is in use", *resume)
    for lost in 10**6, 100:  # bytes, as on a full disk
        former = resource.getrlimit(resource.RLIMIT_FSIZE)
        limit = (copy / "run.params").stat().st_size - lost
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, former[1]))
        try:
            refuse("is the disk full", *resume)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)
    states = (copy / "run.states").read_bytes()
    for content in b"", b"cos\nmkdir\n(S'ran'\ntR.", states[:-200]:
        (copy / "run.states").write_bytes(content)
        refuse("is damaged", *resume)
    assert not Path("ran").exists()  # the second content is a pickle that makes it
    (copy / "run.params").write_bytes((copy / "run.params").read_bytes()[:-200])
    to_predict("is damaged", *image)
    run = json.loads((copy / "run.json").read_text())
    wrong = {"epochs": []}, {"epochs": [1]}, {"classes": 5}, {"settings": {"lr": None}}
    for value in ([], {}, None, *({**run, **values} for values in wrong)):
        (copy / "run.json").write_text(json.dumps(value))
        refuse("run.json", *resume)
        to_predict("run.json", *image)


@needs_mpi
def test_two_processes_train_like_two_contexts(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = *TINY, "--images", "2", "--epochs", "1"  # a single step
    run("train_segmentation.py", *options, "--run-dir", tmp_path / "contexts")
    program = f"import runpy\nrunpy.run_path({SCRIPT!r}, run_name='__main__')"
    options = "--distributed", *options, "--num-devices", "1", "--run-dir", tmp_path
    output = finish(start(2, program, *options, init=""))
    assert output.count("epoch 1:") == 1, output
    found = mx.nd.load(str(tmp_path / "run.params"))
    for name, right in mx.nd.load(str(tmp_path / "contexts/run.params")).items():
        np.testing.assert_allclose(found[name].asnumpy(), right.asnumpy(), 1e-5, 1e-5)


def args(*options):
    return model.Parser().settings(["--crop-size", "64", *map(str, options)])


def test_splits_share_no_digit_and_batches_depend_on_seed_and_epoch_only():
    splits = [data.open_split(name, args()) for name in ("train", "val", "test")]
    inks = [ink.tobytes() for split in splits for ink in split.ink]
    assert len(inks) == 1797
    split, epochs = splits[0], []
    for split.epoch in 3, 3, 4:
        epochs.append([next(iter(split))[0], split[0][0]])
    np.testing.assert_equal(epochs[0], epochs[1])
    for former, other in zip(epochs[0], epochs[2]):
        assert not np.array_equal(former, other)


def test_crops_keep_image_and_label_together():
    split = data.open_split("train", args())
    for index in range(20):
        image, label = split[index]
        assert image.shape == (64, 64, 3) and label.shape == (64, 64)
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


def test_losses_of_shards_sum_to_that_of_the_batch():
    rng = np.random.default_rng(0)
    scores, label = rng.normal(size=(3, 4, 5, 5)), rng.integers(-1, 4, (3, 5, 5))
    log_p = np.moveaxis(log_softmax(scores, axis=1), 1, -1)[label >= 0]
    right = -1.4 * log_p[np.arange(len(log_p)), label[label >= 0]].sum()
    loss = model.NetWithLoss(lambda x: (x, x))
    x, y = (mx.nd.array(array, dtype="float64") for array in (scores, label))
    with autograd.record():
        total = loss(x[:1], y[:1]).sum() + loss(x[1:], y[1:]).sum()
    assert total.asscalar() == pytest.approx(right, 1e-12)


@pytest.mark.parametrize("name", model.MODELS)
def test_every_model_trains(name):
    net = model.NetWithLoss(model.build_model(args("--model", name), 5, [mx.cpu()]))
    with autograd.record():
        loss = net(mx.nd.zeros((2, 3, 64, 64)), mx.nd.zeros((2, 64, 64)))
    loss.backward()
    assert loss.shape == (2,) and np.isfinite(loss.asnumpy()).all()
