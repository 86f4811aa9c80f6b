"""Scenes composed from real handwritten digits: the data set that needs no download.

The 1,797 digits of 8x8 pixels are part of scikit-learn (from the UCI set "Optical
Recognition of Handwritten Digits"). A scene is a coloured background with stripes and
two to four digits, each turned, sized and coloured at random; a pixel of a digit's
stroke has the label digit + 1, the rest is background. Scenes for training, validation
and testing share no digit. A scene depends on (seed, split, index) and nothing else.
"""

import numpy as np
from PIL import Image, ImageDraw

SPLITS = "train", "val", "test"
STROKE = 0.3  # ink above this share of black belongs to the digit


class DigitScenes:
    classes = ("background",) + tuple(f"digit {digit}" for digit in range(10))
    may_flip = False  # a mirrored 2 is no 2

    def __init__(self, split, count, config):
        from sklearn.datasets import load_digits

        data = load_digits()
        tenth = np.arange(len(data.images)) % 10
        chosen = {"train": tenth % 5 != 4, "val": tenth == 4, "test": tenth == 9}[split]
        self._ink = np.round(data.images[chosen] * (255 / 16)).astype(np.uint8)
        self._digit = data.target[chosen]
        self._key = (config.seed, SPLITS.index(split))
        self._count, self._size = count, config.crop_size
        self._composed = {}

    def __len__(self):
        return self._count

    def load(self, index):
        if index not in self._composed:
            self._composed[index] = self._compose(index)
        return self._composed[index]

    def _compose(self, index):
        rng = np.random.default_rng([*self._key, index])
        image = _background(rng, self._size)
        label = np.zeros((self._size, self._size), np.int32)
        quarters = [(y, x) for y in (0, 1) for x in (0, 1)]
        for quarter in rng.permutation(quarters)[: rng.integers(2, 5)]:
            self._place_digit(rng, image, label, quarter)
        image += rng.normal(0, 6, image.shape)
        return np.clip(image, 0, 255).astype(np.uint8), label

    def _place_digit(self, rng, image, label, quarter):
        """Draw one digit anywhere in a quarter of the scene."""
        half = self._size // 2
        side = int(half * rng.uniform(0.7, 1))
        pick = rng.integers(len(self._ink))
        ink = _enlarged(self._ink[pick], side, rng.uniform(-15, 15))
        colour = rng.permutation([255, rng.uniform(130, 255), rng.uniform(60, 255)])
        y, x = quarter * half + rng.integers(0, half - side + 1, 2)
        window = np.s_[y : y + side, x : x + side]
        image[window] += ink[..., None] * (colour - image[window])
        label[window][ink > STROKE] = self._digit[pick] + 1


def _background(rng, size):
    """A dark gradient between two colours, with a few stripes."""
    low, high = rng.uniform(0, 90, (2, 3))
    angle = rng.uniform(0, 2 * np.pi)
    y, x = np.mgrid[0:size, 0:size] / size - 0.5
    ramp = np.clip(0.5 + x * np.cos(angle) + y * np.sin(angle), 0, 1)[..., None]
    picture = Image.fromarray((low + ramp * (high - low)).astype(np.uint8))
    draw = ImageDraw.Draw(picture)
    for _ in range(rng.integers(2, 6)):
        ends = tuple(int(end) for end in rng.integers(0, size, 4))
        tint = tuple(int(part) for part in rng.integers(40, 130, 3))
        draw.line(ends, fill=tint, width=int(rng.integers(1, 4)))
    return np.asarray(picture, dtype=np.float64)


def _enlarged(ink, side, degrees):
    picture = Image.fromarray(ink).resize((side, side), Image.BICUBIC)
    return np.asarray(picture.rotate(degrees, Image.BILINEAR), np.float64) / 255
