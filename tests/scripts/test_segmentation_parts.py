"""The parts of the segmentation scripts, each by itself and without training."""

import mxnet as mx
import numpy as np
import pytest
from PIL import Image
from scipy.special import log_softmax

pytest.importorskip("gluoncv", reason="the segmentation scripts need GluonCV")
from segmentation.config import MODELS, Config
from segmentation.data import Batches, open_datasets, open_split
from segmentation.data.augment import normalized, train_view, val_view
from segmentation.engine import SegmentationLoss, poly_lr
from segmentation.errors import UserError
from segmentation.metrics import Confusion
from segmentation.models import build_model, output_weights


def config(**values):
    return Config.from_dict({"crop_size": 64, **values})


def test_batches_depend_on_seed_and_epoch_only():
    def epoch(number):
        settings = config(train_images=5, batch_size=4)
        return list(
            Batches(open_split("train", settings), settings, True).epoch(number)
        )

    one, again, other = epoch(3), epoch(3), epoch(4)
    np.testing.assert_equal(one, again)
    assert not np.array_equal(one[0][0], other[0][0])
    assert [len(x) for x, _ in one] == [4, 1]


def test_digit_scenes_label_the_bright_strokes():
    scenes, seen = open_split("train", config(train_images=40)), set()
    for index in range(40):
        image, label = scenes.load(index)
        assert image.shape == (64, 64, 3) and image.dtype == np.uint8
        assert label.shape == (64, 64) and label.dtype == np.int32
        seen |= set(np.unique(label))
        brightest = image.max(axis=2).astype(float)
        assert brightest[label > 0].mean() > brightest[label == 0].mean() + 60
    assert seen == set(range(11))


def test_splits_share_no_digit():
    splits = [open_split(split, config()) for split in ("train", "val", "test")]
    inks = [{ink.tobytes() for ink in split._ink} for split in splits]
    assert [len(split._ink) for split in splits] == [1438, 180, 179]
    assert not inks[0] & inks[1] and not inks[0] & inks[2] and not inks[1] & inks[2]


def write_pair(image_path, label_path, label):
    for path in image_path, label_path:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(label.astype(np.uint8)).save(path)


def test_a_folder_has_three_splits_and_two_labels_to_ignore(tmp_path):
    label = np.array([[0, 1, 2, 3], [255, 3, 0, 1]])
    images, labels = tmp_path / "images", tmp_path / "labels"
    for name in "train/a", "train/b", "val/a", "test/a":
        write_pair(images / f"{name}.jpg", labels / f"{name}.png", label)
    options = {"dataset": "folder", "data_root": str(tmp_path), "ignore_label": 3}
    options["class_names"] = "sky, road, car"
    settings = config(**options)
    train, val = open_datasets(settings)
    assert len(train) == 2 and len(val) == 1
    assert len(open_split("train", config(train_images=1, **options))) == 1
    for split in train, val, open_split("test", settings):
        assert split.load(0)[1].tolist() == [[0, 1, 2, -1], [-1, -1, 0, 1]]
    assert val.classes == ("sky", "road", "car")
    with pytest.raises(UserError, match="contains the label 3"):
        open_split("val", config(**{**options, "ignore_label": 7})).load(0)
    Image.fromarray(np.zeros((3, 4), np.uint8)).save(labels / "val/a.png")
    with pytest.raises(UserError, match="must have the rows and columns of its image"):
        val.load(0)
    (images / "test/a.jpg").write_bytes((images / "val/a.jpg").read_bytes()[:-20])
    with pytest.raises(UserError, match="a.jpg is not a readable image"):
        open_split("test", settings).load(0)


def test_training_images_of_voc_are_not_those_of_validation(tmp_path):
    root, label = tmp_path / "VOC2012", np.array([[0, 1], [2, 255]])
    for name in "abc":
        image = root / f"JPEGImages/{name}.jpg"
        write_pair(image, root / f"SegmentationClass/{name}.png", label)
    lists = root / "ImageSets/Segmentation"
    lists.mkdir(parents=True)
    (lists / "trainval.txt").write_text("a\nb\nc\n")
    (lists / "val.txt").write_text("c\n")
    options = {"dataset": "voc", "data_root": str(tmp_path)}
    train, val = open_datasets(config(**options))
    assert (len(train), len(val), len(train.classes)) == (2, 1, 21)
    image, label = val.load(0)
    assert image.shape == (2, 2, 3) and label.tolist() == [[0, 1], [2, -1]]
    (root / "JPEGImages/c.jpg").write_bytes(b"no image")
    with pytest.raises(UserError, match="could not read --dataset voc in"):
        val.load(0)


def test_views_are_square_and_keep_image_and_label_together():
    rng = np.random.default_rng(0)
    label = rng.integers(0, 5, (70, 90)).astype(np.int32)
    image = np.repeat(label[..., None] * 40, 3, axis=2).astype(np.uint8)
    for k in range(20):
        x, y = train_view(image, label, 70, True, np.random.default_rng(k), (1, 1))
        assert x.shape == (70, 70, 3)
        np.testing.assert_array_equal(x[..., 0], y * 40)
    x, y = train_view(image, label, 96, True, rng, (0.5, 0.5))  # padded
    assert y.shape == (96, 96) and (y == -1).any() and (y >= 0).any()
    assert (x[y == -1] == (124, 116, 104)).all()  # the mean that becomes 0
    x, y = val_view(image, label, 64)
    assert y.shape == (64, 64) and normalized(x).shape == (3, 64, 64)


def test_confusion_by_hand():
    confusion = Confusion(3)
    confusion.add(np.array([0, 0, 1, 1, -1]), np.array([0, 1, 1, 1, 2]))
    confusion.add(np.array([[0]]), np.array([[0]]))
    assert confusion.counts.tolist() == [[2, 1, 0], [0, 2, 0], [0, 0, 0]]
    assert confusion.pixel_accuracy() == 4 / 5
    np.testing.assert_array_equal(confusion.class_iou(), [2 / 3, 2 / 3, np.nan])
    assert confusion.mean_iou() == pytest.approx(2 / 3)


def test_poly_learning_rate_by_hand():
    assert poly_lr(0.2, 50, 100, 0) == pytest.approx(0.2 * 0.5**0.9)
    assert poly_lr(0.2, 4, 100, 10) == pytest.approx(0.1 * 0.96**0.9)


def test_loss_of_shards_adds_up_to_that_of_the_batch():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(3, 4, 5, 5)).astype(np.float32)
    label = rng.integers(-1, 4, (3, 5, 5))
    log_p = log_softmax(scores.astype(np.float64), axis=1)
    picked = np.take_along_axis(log_p, np.maximum(label, 0)[:, None], axis=1)[:, 0]
    expected = -1.5 * picked[label >= 0].sum()
    loss = SegmentationLoss((1.0, 0.5), 5)
    x, y = mx.nd.array(scores), mx.nd.array(label)
    total = loss(x[:1], x[:1], y[:1]).sum() + loss(x[1:], x[1:], y[1:]).sum()
    terms = label.size * 2
    assert total.asscalar() == pytest.approx(
        expected, rel=terms * np.finfo(np.float32).eps
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_the_outputs_that_the_loss_weighs(name):
    settings = config(model=name)
    outputs = build_model(settings, 5, [mx.cpu()])(mx.nd.zeros((1, 3, 64, 64)))
    assert len(outputs) == len(output_weights(settings))
    assert outputs[0].shape == (1, 5, 64, 64)


def test_bad_settings_are_one_sentence(tmp_path):
    nowhere = {"data_root": str(tmp_path)}
    for values, sentence in (
        ({"crop_size": 50}, "multiple of 32"),
        ({"epochs": 0}, "--epochs is 0, but must be at least 1"),
        ({"lr": float("nan")}, "--lr is nan, but must be at least 1e-12"),
        ({"dataset": "voc"}, "digits have none, and all others need it"),
        ({"pretrained": True}, "no ImageNet weights"),
        ({"model": "fcn", "backbone": "x"}, "cannot make fcn with --backbone 'x'"),
        ({"dataset": "folder", **nowhere}, "needs two names or more"),
        ({"dataset": "folder", "class_names": "a,b", **nowhere}, "There is no .jpg"),
        ({"dataset": "citys", **nowhere}, "could not read --dataset citys in"),
    ):
        with pytest.raises(UserError, match=sentence):
            build_model(config(**values), 5, [mx.cpu()])
            open_split("train", config(**values))
