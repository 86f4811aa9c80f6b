"""The parts of the segmentation scripts, each by itself and without training."""

import signal

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("gluoncv", reason="the segmentation scripts need GluonCV")
from segmentation import interrupts
from segmentation.config import MODELS, Config
from segmentation.data import Batches, open_datasets, open_split
from segmentation.data.augment import normalized, train_view, val_view
from segmentation.data.digits import DigitScenes
from segmentation.engine import SegmentationLoss, poly_lr
from segmentation.errors import UserError
from segmentation.metrics import Confusion
from segmentation.models import build_model, output_weights


def config(**values):
    return Config.from_dict({"crop_size": 64, **values})


# ---------------------------------------------------------------- batches


def test_batches_depend_on_seed_and_epoch_only():
    settings = config(train_images=5, batch_size=4)
    first, _ = open_datasets(settings)
    again, _ = open_datasets(settings)
    one = list(Batches(first, settings, training=True).epoch(3))
    two = list(
        Batches(again, config(train_images=5, batch_size=4, workers=3), True).epoch(3)
    )
    other = list(Batches(first, settings, training=True).epoch(4))
    for (x, y), (x2, y2) in zip(one, two):
        np.testing.assert_array_equal(x, x2)
        np.testing.assert_array_equal(y, y2)
    assert not np.array_equal(one[0][0], other[0][0])
    assert [len(x) for x, _ in one] == [4, 1]


# ---------------------------------------------------------------- data sets


def test_digit_scenes_label_the_bright_strokes():
    scenes = DigitScenes("train", 40, config())
    seen = set()
    for index in range(40):
        image, label = scenes.load(index)
        assert image.shape == (64, 64, 3) and image.dtype == np.uint8
        assert label.shape == (64, 64) and label.dtype == np.int32
        seen |= set(np.unique(label))
        brightest = image.max(axis=2).astype(float)
        assert brightest[label > 0].mean() > brightest[label == 0].mean() + 60
    assert seen == set(range(11))


def test_splits_share_no_digit():
    splits = [DigitScenes(split, 1, config()) for split in ("train", "val", "test")]
    inks = [{ink.tobytes() for ink in split._ink} for split in splits]
    assert [len(split._ink) for split in splits] == [1438, 180, 179]
    assert not inks[0] & inks[1] and not inks[0] & inks[2] and not inks[1] & inks[2]
    scenes = [split.load(0)[0] for split in splits]
    assert (scenes[1] != scenes[2]).any()


def write_pair(root, split, name, label):
    for kind in ("images", "labels"):
        (root / kind / split).mkdir(parents=True, exist_ok=True)
    image = np.zeros((*label.shape, 3), np.uint8)
    Image.fromarray(image).save(root / "images" / split / f"{name}.jpg")
    Image.fromarray(label.astype(np.uint8)).save(
        root / "labels" / split / f"{name}.png"
    )


def test_a_folder_has_three_splits_and_two_labels_to_ignore(tmp_path):
    label = np.array([[0, 1, 2, 3], [255, 3, 0, 1]])
    for split in "train", "val", "test":
        write_pair(tmp_path, split, "a", label)
    write_pair(tmp_path, "train", "b", label)
    folder = {"dataset": "folder", "data_root": str(tmp_path)}
    options = {"num_classes": 3, "ignore_label": 3, **folder}
    settings = config(**options)
    train, val = open_datasets(settings)
    assert len(train) == 2 and len(val) == 1
    assert len(open_split("train", config(train_images=1, **options))) == 1
    for split in train, val, open_split("test", settings):
        assert split.load(0)[1].tolist() == [[0, 1, 2, -1], [-1, -1, 0, 1]]
    assert val.classes == ("class 0", "class 1", "class 2")
    (tmp_path / "images/test/a.jpg").unlink()
    with pytest.raises(UserError, match="holds no .jpg or .png image"):
        open_split("test", settings)


IMAGE, LABELS = np.full((2, 2, 3), 100, np.uint8), np.array([[0, 1], [2, 255]], "u1")
CITY = np.array([[7, 8], [33, 0]], np.uint8)
# Per data set of GluonCV the files of two images, an array of labels, what it means,
# and the number of classes.
SETS = {
    "voc": (
        *("VOC2012/JPEGImages/{}.jpg", "VOC2012/SegmentationClass/{}.png"),
        *(LABELS, [[0, 1], [2, -1]], 21),
    ),
    "ade20k": (
        "ADEChallengeData2016/images/{split}/{}.jpg",
        "ADEChallengeData2016/annotations/{split}/{}.png",
        *(np.array([[0, 1], [2, 150]], np.uint8), [[-1, 0], [1, 149]], 150),
    ),
    "citys": (
        "leftImg8bit/{split}/town/{}_leftImg8bit.png",
        "gtFine/{split}/town/{}_gtFine_labelIds.png",
        *(CITY, [[0, 1], [18, -1]], 19),
    ),
}
SPLITS = {"ade20k": ("training", "validation"), "citys": ("train", "val")}


@pytest.mark.parametrize("kind", SETS)
def test_gluoncv_sets_share_no_image_and_number_classes_from_0(tmp_path, kind):
    image_path, label_path, labels, expected, classes = SETS[kind]
    training, validation = SPLITS.get(kind, ("", ""))
    for name, split in ("a", training), ("b", training), ("c", validation):
        for path, pixels in (image_path, IMAGE), (label_path, labels):
            path = tmp_path / path.format(name, split=split)
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    if kind == "voc":
        lists = tmp_path / "VOC2012/ImageSets/Segmentation"
        lists.mkdir(parents=True)
        (lists / "trainval.txt").write_text("a\nb\nc\n")
        (lists / "val.txt").write_text("c\n")
    options = {"dataset": kind, "data_root": str(tmp_path)}
    assert len(open_datasets(config(train_images=1, **options))[0]) == 1
    train, val = open_datasets(config(**options))
    assert (len(train), len(val), len(train.classes)) == (2, 1, classes)
    for dataset in (train, val):
        image, label = dataset.load(0)
        assert image.shape == (2, 2, 3) and image.dtype == np.uint8
        assert label.tolist() == expected


def test_views_are_square_and_keep_image_and_label_together():
    rng = np.random.default_rng(0)
    label = rng.integers(0, 5, (70, 90)).astype(np.int32)
    image = np.repeat(label[..., None] * 40, 3, axis=2).astype(np.uint8)
    for k in range(20):
        x, y = train_view(image, label, 70, (1, 1), True, np.random.default_rng(k))
        assert x.shape == (70, 70, 3)
        np.testing.assert_array_equal(x[..., 0], y * 40)
    x, y = train_view(image, label, 96, (0.5, 0.5), True, rng)  # padded
    assert y.shape == (96, 96) and (y == -1).any() and (y >= 0).any()
    assert x.shape == (96, 96, 3)
    assert (x[y == -1] == (124, 116, 104)).all()  # the mean that becomes 0
    x, y = val_view(image, label, 64)
    assert x.shape == (64, 64, 3) and y.shape == (64, 64)
    assert normalized(x).shape == (3, 64, 64)


# ---------------------------------------------------------------- numbers


def test_confusion_by_hand():
    confusion = Confusion(3)
    confusion.add(np.array([0, 0, 1, 1, -1]), np.array([0, 1, 1, 1, 2]))
    confusion.add(np.array([[0]]), np.array([[0]]))
    assert confusion.counts.tolist() == [[2, 1, 0], [0, 2, 0], [0, 0, 0]]
    assert confusion.pixel_accuracy() == 4 / 5
    np.testing.assert_array_equal(confusion.class_iou(), [2 / 3, 2 / 3, np.nan])
    assert confusion.mean_iou() == pytest.approx(2 / 3)


def test_poly_learning_rate_by_hand():
    assert poly_lr(0.2, 0, 100, 0) == 0.2
    assert poly_lr(0.2, 50, 100, 0) == pytest.approx(0.2 * 0.5**0.9)
    assert poly_lr(0.2, 0, 100, 10) == pytest.approx(0.02)
    assert poly_lr(0.2, 4, 100, 10) == pytest.approx(0.1 * 0.96**0.9)
    assert poly_lr(0.2, 99, 100, 10) == pytest.approx(0.2 * 0.01**0.9)


def test_loss_of_shards_adds_up_to_that_of_the_batch():
    import mxnet as mx

    rng = np.random.default_rng(0)
    scores = rng.normal(size=(3, 4, 5, 5)).astype(np.float32)
    label = rng.integers(-1, 4, (3, 5, 5))
    shifted = scores.astype(np.float64)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    picked = np.take_along_axis(log_p, np.maximum(label, 0)[:, None], axis=1)[:, 0]
    expected = -1.5 * picked[label >= 0].sum()
    loss = SegmentationLoss((1.0, 0.5), 5)
    total = 0.0
    for rows in (slice(0, 1), slice(1, 3)):
        x, y = mx.nd.array(scores[rows]), mx.nd.array(label[rows])
        total += float(loss(x, x, y).sum().asscalar())
    terms = label.size * 2
    assert total == pytest.approx(expected, rel=terms * np.finfo(np.float32).eps)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_the_outputs_that_the_loss_weighs(name):
    import mxnet as mx

    settings = config(model=name, num_devices=1)
    net = build_model(settings, 5, [mx.cpu()])
    outputs = net(mx.nd.zeros((1, 3, 64, 64)))
    assert len(outputs) == len(output_weights(settings))
    assert outputs[0].shape == (1, 5, 64, 64)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "values,sentence",
    [
        ({"crop_size": 50}, "multiple of 32"),
        ({"epochs": 0}, "--epochs is 0, but must be a number, at least 1"),
        ({"lr": float("nan")}, "--lr is nan, but must be a number, at least 1e-12"),
        ({"max_scale": 0.1}, "at least --min-scale"),
        ({"model": "../../x"}, "one of fastscnn"),
        ({"dataset": "voc"}, "needs --data-root"),
        ({"data_root": "x"}, "no use"),
        ({"num_classes": 3}, "are for --dataset folder"),
        ({"backbone": "xception"}, "deeplabv3plus"),
        ({"pretrained": True}, "no ImageNet weights"),
        ({"color": 1}, "'color' is unknown"),
    ],
)
def test_bad_settings_are_one_sentence(values, sentence):
    with pytest.raises(UserError, match=sentence):
        config(**values)


# ------------------------------------------------------------- interrupts


@pytest.mark.parametrize("ignored", [True, False])
def test_interrupts_are_noted_where_they_are_not_ignored(ctrl_c, ignored):
    """A shell's background jobs ignore Ctrl-C, which is for the job in front."""
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.install()
    assert (signal.getsignal(signal.SIGINT) is signal.SIG_IGN) is ignored
