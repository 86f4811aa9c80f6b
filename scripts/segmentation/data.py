"""Data sets for segmentation, and pictures of predictions."""

from pathlib import Path

from gluon_syncbn import distributed

import gluoncv.data  # noqa: F401, it sets LOAD_TRUNCATED_IMAGES
import mxnet as mx
import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image, ImageFile
from sklearn.datasets import load_digits

ImageFile.LOAD_TRUNCATED_IMAGES = False  # if it is True, missing data become grey


class UserError(Exception):
    """A mistake of the user, described in one sentence."""


class Split:
    """The batches of this process. Crops depend only on seed, epoch and image.

    `load(item)` returns an image and its int32 label map; -1 means unlabelled.
    """

    def __init__(self, name, args, items):
        self.items, self.args, self.epoch = items[: args.images or None], args, 0
        rows, self.is_training = len(self.items), False
        own_rows = range(distributed.rank(), rows, distributed.size())
        self.sampler = mx.gluon.data.BatchSampler(own_rows, args.batch_size, "keep")
        if name == "train":
            self.sampler, self.is_training = _TrainingRows(self, rows), True
        more = {"num_workers": 1, "thread_pool": True, "batchify_fn": assemble}
        self.loader = mx.gluon.data.DataLoader(self, batch_sampler=self.sampler, **more)

    def __iter__(self):
        return iter(self.loader)

    def __getitem__(self, index):
        """Return a square crop of an image (uint8) and of its label map."""
        rng = None
        if self.is_training:
            rng = np.random.default_rng([self.args.seed, self.epoch, index])
        return square(*self.load(self.items[index]), self.args.crop_size, rng)


class _TrainingRows:
    """This process's rows of each batch; every process gets a row of the last batch."""

    def __init__(self, split, rows):
        self._split, self._rows, self._size = split, rows, split.args.batch_size
        last = rows % self._size or self._size
        self._filled = rows + max(0, distributed.size() - last)

    def __iter__(self):
        order = np.arange(self._rows)
        seed = [self._split.args.seed, self._split.epoch]
        np.random.default_rng(seed).shuffle(order)
        order = np.resize(order, self._filled)  # wraps around
        for start in range(0, self._filled, self._size):
            batch = order[start : start + self._size]
            yield batch[distributed.rank() :: distributed.size()].tolist()

    def __len__(self):
        return -(-self._filled // self._size)


class Digits(Split):
    """Scenes of four handwritten digits from scikit-learn. Splits share no image."""

    classes = ["background", *map(str, range(10))]

    def __init__(self, name, args):
        data, tenth = load_digits(), np.arange(1797) % 10
        chosen = {"train": tenth % 5 != 4, "val": tenth == 4, "test": tenth == 9}[name]
        self.ink, self.digits = data.images[chosen] / 16, data.target[chosen]
        super().__init__(name, args, range(600 if name == "train" else 100))

    def load(self, item):
        rng = np.random.default_rng([item, len(self.ink)])
        half = self.args.crop_size // 2
        image = rng.normal(40, 15, (2 * half, 2 * half, 3))
        label = np.zeros(image.shape[:2], np.int32)
        for y, x in (0, 0), (0, half), (half, 0), (half, half):
            pick, size = rng.integers(len(self.ink)), int(half * rng.uniform(0.7, 1))
            ink = Image.fromarray(self.ink[pick]).resize((size, size), Image.BILINEAR)
            window, ink = np.s_[y : y + size, x : x + size], np.asarray(ink)
            image[window] += ink[..., None] * rng.uniform(80, 200, 3)
            label[window][ink > 0.3] = self.digits[pick] + 1
        return np.clip(image, 0, 255).astype(np.uint8), label


class Folder(Split):
    """A folder with images/SPLIT/NAME.jpg and labels/SPLIT/NAME.png, or Pascal VOC."""

    def __init__(self, name, args):
        root, self.classes = Path(args.data_root), args.class_names.split(",")
        lists = root / "ImageSets" / "Segmentation"
        if lists.is_dir():
            stems = (lists / f"{name}.txt").read_text().split()
            images = [root / "JPEGImages" / f"{stem}.jpg" for stem in stems]
            labels = root / "SegmentationClass"
        else:
            images = sorted((root / "images" / name).glob("*.*"))
            labels = root / "labels" / name
        if len(self.classes) < 2:
            raise UserError("--class-names must name at least 2 classes, as in A,B.")
        if not images:
            raise UserError(f"{root}/images/{name} or VOC's {name}.txt has no images.")
        pairs = [(path, labels / f"{path.stem}.png") for path in images]
        super().__init__(name, args, pairs)

    def load(self, item):
        image, label = read(item[0]), read(item[1], is_label=True)
        unlabelled = np.isin(label, [255, self.args.ignore_label])
        label = np.where(unlabelled, -1, label.astype(np.int32))
        if label.shape != image.shape[:2]:
            shapes = f"{image.shape[:2]}, got {label.shape}"
            raise UserError(f"{item[1]} must have the shape {shapes}.")
        if label.max() >= len(self.classes):
            labels = f"{len(self.classes)}, got {label.max()} (see --ignore-label)"
            raise UserError(f"Labels in {item[1]} must be below {labels}.")
        return image, label


def open_split(name, args):
    return (Folder if args.data_root else Digits)(name, args)


def read(path, is_label=False):
    """Return an image as uint8 (height, width, 3), or a label map unchanged."""
    try:
        picture = Image.open(path)
        picture.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"The image {path} cannot be read: {error}.") from None
    if picture.mode[0] in "IF" and not is_label:  # convert() would clip values
        raise UserError(f"The image {path} must have 8 bits, got mode {picture.mode}.")
    return np.asarray(picture if is_label else picture.convert("RGB"))


def square(image, label, crop, rng=None):
    """Return the middle square or, given `rng`, a square of random scale and place."""
    short = round(crop * (rng.uniform(1, 1.5) if rng else 1))
    size = [max(short, round(s * short / min(label.shape))) for s in label.shape[::-1]]
    image = np.asarray(Image.fromarray(image).resize(size, Image.BILINEAR))
    label = np.asarray(Image.fromarray(label).resize(size, Image.NEAREST))
    room = [side - crop for side in label.shape]
    y, x = rng.integers(0, np.add(room, 1)) if rng else np.floor_divide(room, 2)
    return image[y : y + crop, x : x + crop], label[y : y + crop, x : x + crop]


def assemble(views):
    """Return images as float32 (n, 3, crop, crop) with mean about 0, and labels."""
    images, labels = map(np.stack, zip(*views))
    x = (images.transpose(0, 3, 1, 2).astype(np.float32, "C") - 118) / 58
    return x, labels.astype(np.float32)


def painted(label, num_classes):
    """Return the label map in colours; unlabelled pixels (-1) are grey."""
    colours = colormaps["nipy_spectral"].resampled(num_classes + 1)
    return colours(label % (num_classes + 1), bytes=True)[..., :3]


def save_picture(path, rows, shown, classes, title):
    """Draw rows of pictures of equal shape above a legend of the classes `shown`."""
    grid = np.vstack([np.hstack(row) for row in rows])
    figure = Figure((9, 9 * len(grid) / len(grid[0]) + 1.5), layout="constrained")
    axis = figure.add_subplot(title=title, frame_on=False, xticks=[], yticks=[])
    axis.imshow(grid, interpolation="nearest")
    colours = painted(shown, len(classes)) / 255
    handles = [Patch(color=c, label=classes[k]) for c, k in zip(colours, shown)]
    figure.legend(handles=handles, loc="outside lower center", ncol=5, frameon=False)
    figure.savefig(path, dpi=120)
