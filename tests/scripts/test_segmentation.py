"""The segmentation script: whole tiny runs, single functions, and odd input."""

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

pytest.importorskip("gluoncv", reason="the segmentation script needs GluonCV")
import train_segmentation as script

SCRIPT = script.__file__
TINY = "--crop-size 64 --images 4 --batch-size 2 --epochs 2 --lr 0.02".split()
FILES = {"run.json", "epoch-2.params", "epoch-2.states"}
FILES |= {"curves.png", "predictions.png"}


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run the script in this process; check the exit code, return its output."""
    monkeypatch.chdir(tmp_path)

    def call(code, *options):
        monkeypatch.setattr(sys, "argv", ["script", *map(str, options)])
        try:
            assert script.exit_code() == code
        except SystemExit as exit:  # raised by argparse
            assert exit.code == code
        return "".join(capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    output = run_tool(sys.executable, SCRIPT, *TINY, "--run-dir", folder)
    assert "2 steps" in output and "epoch 2 of 2: loss" in output
    assert set(os.listdir(folder)) == FILES
    return folder


@pytest.mark.parametrize("saves, is_renamed", [(1, True), (2, False)])
def test_an_interrupted_run_continues_exactly(
    saves, is_renamed, trained, tmp_path, call, monkeypatch
):
    """Ctrl-C comes in a save, directly before or after run.json is renamed."""
    replace, renamed = os.replace, []

    def interrupt(*paths):
        renamed.append(paths)
        if is_renamed or len(renamed) < saves:
            replace(*paths)
        if len(renamed) == saves:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    assert "--resume RUN continues" in call(130, *TINY, "--run-dir", tmp_path)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    call(0, "--resume", tmp_path)
    for name in "epoch-2.params", "run.json":
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()
    assert set(os.listdir(tmp_path)) == FILES


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
        options = shlex.split(line, comments=True)[2:]
        call(0, *options, *more)
    assert min(Image.open("prediction.png").size) > 200
    assert "must end in .png" in call(2, *options, "--output", "x.xyz")


@pytest.mark.parametrize("norm", script.NORMS)
def test_a_run_is_drawn_beside_another_one(norm, trained, call):
    output = call(0, *TINY, "--norm", norm, "--epochs", 1, "--beside", trained)
    for name in script.NORMS["syncbn"], script.NORMS[norm]:
        assert re.search(rf"validation mIoU 0\.\d+ with {name}", output)
    run = Path("runs/digits-FastSCNN-" + norm)
    assert Image.open(run / "predictions.png").size[0] == 1080
    assert Image.open(run / "curves.png").size == (1200, 408)


def test_the_last_epochs_freeze_statistics(call):
    call(0, *TINY, "--norm", "bn", "--epochs", 1, "--freeze-epochs", 1)
    trained = mx.nd.load("runs/digits-FastSCNN-bn/epoch-1.params")
    means = [array for name, array in trained.items() if "running_mean" in name]
    assert means and not any(mean.asnumpy().any() for mean in means)


SMALL, LABEL = Image.new("L", (2, 2)), np.zeros((2, 2), np.uint8)


@pytest.mark.parametrize(
    "words, arguments",
    [
        ("a multiple of 32", ["--crop-size", 50]),
        ("epochs must be positive", ["--epochs", 0]),
        ("Did you mean --batch-size?", ["--batchsize", 4]),
        ("unknown argument --zzz", ["--zzz"]),
        ("gpu(", ["--ctx", "gpu", "--num-devices", 99]),
        ("must be a folder, got none", ["--data-root", "none"]),
        ("name at least 2 classes", ["--data-root", "."]),
        ("images/train has no images", ["--data-root", ".", "--class-names", "A,B"]),
        ("has a run", ["--run-dir", "RUN"]),
        ("Add --epochs 4", ["--resume", "RUN"]),
        ("none/run.json", ["--beside", "none"]),
        ("run.json", "run.json"),
        ("are damaged", "epoch-2.params"),
        ("are damaged", "epoch-2.states"),
        ("cannot be read", (Image.new("1", (13500, 13500)), LABEL)),
        ("must have 8 bits", (Image.new("I;16", (2, 2), 500), LABEL)),
        ("--ignore-label", (SMALL, LABEL + 255)),
        ("values below 2", (SMALL, LABEL + 7)),
        ("must have shape (2, 2)", (SMALL, LABEL[:1])),
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
    assert words in call(2, *TINY, *arguments)
    assert before == {path.name: path.read_bytes() for path in run.iterdir()}


@needs_mpi
def test_two_processes_train_like_two_contexts(tmp_path, monkeypatch, call):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = *TINY, "--images", "2", "--epochs", "1"  # a single step
    call(0, *options, "--run-dir", tmp_path / "contexts")
    program = f"import runpy\nrunpy.run_path({SCRIPT!r}, run_name='__main__')"
    options = "--distributed", *options, "--num-devices", "1", "--run-dir", tmp_path
    assert finish(start(2, program, *options, init="")).count("epoch 1 of 1:") == 1
    found = mx.nd.load(str(tmp_path / "epoch-1.params"))
    for name, right in mx.nd.load(str(tmp_path / "contexts/epoch-1.params")).items():
        np.testing.assert_allclose(found[name].asnumpy(), right.asnumpy(), 1e-5, 1e-5)


def args(*options):
    options = ["--crop-size", "64", *map(str, options)]
    return script.settings_parser().parse_args(options)


@pytest.mark.parametrize("rows, ranks", [(13, 2), (13, 3), (9, 4), (3, 2)])
def test_ranks_share_each_batch(rows, ranks, monkeypatch):
    """All ranks train as many batches; a batch too small for them is left out."""
    monkeypatch.setattr(script.distributed, "size", lambda: ranks)
    seen = {True: [], False: []}
    for rank in range(ranks):
        monkeypatch.setattr(script.distributed, "rank", lambda rank=rank: rank)
        for name in "train", "val":
            split = script.Split(name, args("--images", rows, "--batch-size", 4))
            seen[split.is_training].append(split.batches)
    assert len({len(batches) for batches in seen[True]}) == 1
    trained, evaluated = (sum(sum(s, []), []) for s in seen.values())
    left_out = rows % 4 if rows % 4 < ranks else 0
    assert len(set(trained)) == len(trained) == rows - left_out
    assert sorted(evaluated) == list(range(rows))


def test_crops_depend_on_the_epoch_and_keep_image_and_label_together():
    split = script.Split("train", args())
    first, _ = split[0]
    for epoch in range(1, 20):
        split.start_epoch(epoch)
        image, label = split[0]
        assert not np.array_equal(image, first)
        brightest = image.max(axis=2).astype(float)
        assert brightest[label > 0].mean() > brightest[label == 0].mean() + 50


def test_folders(tmp_path):
    options = write_folder(tmp_path, Image.new("L", (4, 1)), np.uint8([[0, 1, 2, 255]]))
    split = script.Split("val", args(*options, "--ignore-label", 2))
    assert split.data.load(split.items[0])[1].tolist() == [[0, 1, -1, -1]]


def test_loss_and_scores_by_hand():
    """The softmax of a predicted class is 1/2, and of the two other classes 1/4."""
    truth, predicted = [0, 0, 1, 1, -1, 0], [0, 1, 1, 1, 2, 0]
    x = mx.nd.array(np.log(1 + np.eye(3)[:, predicted]).reshape(1, 3, 6, 1))
    y = np.float32(truth).reshape(1, 6, 1)
    net = script.NetWithLoss(lambda x: (x, x))
    with autograd.record():  # the second output, an auxiliary one, weighs 0.4
        assert net(x, mx.nd.array(y)).asscalar() == pytest.approx(8.4 * np.log(2), 1e-5)
    engine = script.Engine.__new__(script.Engine)
    engine.num_classes, engine.parallel = 3, lambda x, y: net(x, mx.nd.array(y))
    expected = {"pixel_accuracy": 0.8, "mean_iou": 2 / 3}
    assert engine.evaluate([(x, y)] * 2) == pytest.approx(expected, 1e-5)


@pytest.mark.parametrize("name", script.MODELS)
def test_every_model_trains(name):
    net = script.NetWithLoss(script.build_model(args("--model", name), 5))
    loss = differentiate(net, mx.nd.zeros((2, 3, 64, 64)), mx.nd.zeros((2, 64, 64)))
    assert loss.shape == (2,) and np.isfinite(loss.asnumpy()).all()


def test_classes_have_different_colours():
    colours = script.painted(np.arange(-1, 22))
    assert len(np.unique(colours, axis=0)) == 23
    assert colours[0].tolist() == [1, 1, 1] and colours.max(axis=1).min() > 0.4
