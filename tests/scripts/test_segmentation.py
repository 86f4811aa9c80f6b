"""The segmentation scripts: end to end in a tiny size, their parts, and odd input."""

import json
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

TINY = "--crop-size 64 --images 5 --batch-size 2 --epochs 2 --lr 0.02".split()


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
    """A run of two epochs on the embedded digits."""
    folder = tmp_path_factory.mktemp("trained")
    assert "epoch 2:" in run("train_segmentation.py", *TINY, "--run-dir", folder)
    return folder


def test_an_interrupted_run_continues_exactly(trained, tmp_path, refuse, monkeypatch):
    def save(*arguments, save=model.save):
        save(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model, "save", save)
        refuse("--resume", *TINY, "--run-dir", tmp_path, code=130, start="interrupted")
    run("train_segmentation.py", "--resume", tmp_path)
    for name in "run.params", "run.states":
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()
    assert len([*tmp_path.iterdir()]) == len([*trained.iterdir()])
    SMALL.save("a.png")
    image = "--checkpoint", trained, "--image", "a.png", "--output", tmp_path / "y.png"
    run("predict.py", *image)
    for name in "curves.png", "predictions.png", "y.png":
        assert min(Image.open(tmp_path / name).size) > 200


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
        ("32", ["--crop-size", 50]),
        ("epochs", ["--epochs", 0]),
        ("gpu(98)", ["--ctx", "gpu", "--num-devices", 99]),
        ("RUN", ["--run-dir", "RUN"]),
        ("RUN", ["--resume", "RUN"]),
        ("none/run.json", ["--resume", "none"]),
        ("cannot be read", (Image.new("1", (13500, 13500)), LABEL)),
        ("7", (SMALL, LABEL + 7)),
        ("(2, 2)", (SMALL, LABEL[:1])),
    ],
)
def test_odd_input_is_one_sentence(words, arguments, trained, tmp_path, refuse):
    (tmp_path / "RUN").symlink_to(trained)
    if isinstance(arguments, tuple):
        arguments = write_folder(tmp_path, *arguments)
    refuse(words, *TINY, *arguments)


def test_odd_run_folders_are_one_sentence(trained, tmp_path, refuse):
    copy = shutil.copytree(trained, tmp_path / "copy")
    resume = "--resume", copy, "--epochs", 3
    with FileLock(copy / ".lock"):
        refuse("in use", *resume)
    states = (copy / "run.states").read_bytes()
    for content in b"", b"cos\nmkdir\n(S'ran'\ntR.", states[:-200]:
        (copy / "run.states").write_bytes(content)
        refuse("damaged", *resume)
    assert not Path("ran").exists()  # which the second one, a pickle, would make
    run = json.loads((copy / "run.json").read_text())
    for value in [], None, {**run, "epochs": [1]}, {**run, "settings": {"lr": None}}:
        (copy / "run.json").write_text(json.dumps(value))
        refuse("not of a run", *resume)
    image = "--checkpoint", copy, "--image", "a.png"
    refuse("not of a run", *image, work=predict.main)


@needs_mpi
def test_two_processes_train_like_two_contexts(tmp_path):
    options = *TINY, "--images", "2", "--epochs", "1"  # a single step
    run("train_segmentation.py", *options, "--run-dir", tmp_path / "contexts")
    program = "import runpy\nrunpy.run_path(sys.argv.pop(1), run_name='__main__')"
    options = "--distributed", *options, "--num-devices", "1", "--run-dir", tmp_path
    script = ROOT / "scripts/train_segmentation.py"
    output = finish(start(2, program, script, *options, init=""))
    assert output.count("epoch 1:") == 1, output
    found = mx.nd.load(str(tmp_path / "run.params"))
    for name, right in mx.nd.load(str(tmp_path / "contexts/run.params")).items():
        np.testing.assert_allclose(found[name].asnumpy(), right.asnumpy(), 1e-5, 1e-5)


def args(*options):
    return model.Parser().settings(["--crop-size", "64", *map(str, options)])


def test_splits_and_batches_of_digits():
    splits = [data.open_split(name, args()) for name in ("train", "val", "test")]
    assert sum(len(split.ink) for split in splits) == 1797
    split, epochs = splits[0], []
    for image, label in (split[index] for index in range(20)):
        brightest = image.max(axis=2).astype(float)
        assert brightest[label > 0].mean() > brightest[label == 0].mean() + 50
    for split.epoch in 3, 3, 4:
        epochs.append([next(iter(split))[0], split[0][0]])
    np.testing.assert_equal(epochs[0], epochs[1])
    for former, other in zip(epochs[0], epochs[2]):
        assert not np.array_equal(former, other)


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


OTHERS = [pytest.param(n, marks=pytest.mark.full) for n in model.MODELS if n != "FCN"]


@pytest.mark.parametrize("name", ["FCN", *OTHERS])
def test_every_model_trains(name):
    net = model.NetWithLoss(model.build_model(args("--model", name), 5, [mx.cpu()]))
    with autograd.record():
        loss = net(mx.nd.zeros((2, 3, 64, 64)), mx.nd.zeros((2, 64, 64)))
    loss.backward()
    assert loss.shape == (2,) and np.isfinite(loss.asnumpy()).all()
