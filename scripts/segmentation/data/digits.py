"""Scenes composed from real handwritten digits: the data set that needs no download.

The 1,797 digits of 8x8 pixels are part of scikit-learn (from the UCI set "Optical
Recognition of Handwritten Digits"). A scene is a dark gradient with a digit in two to
four of its quarters, each turned, sized and coloured at random; a pixel of a digit's
stroke has the label digit + 1, the rest is background. Scenes for training, validation
and testing share no digit. A scene depends on (seed, split, index) and nothing else.
"""

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

STROKE = 0.3  # ink above this share of black belongs to the digit


class DigitScenes:
    classes = ("background",) + tuple(f"digit {digit}" for digit in range(10))
    may_flip = False  # a mirrored 2 is no 2

    def __init__(self, split, count, config):
        data = load_digits()
        tenth = np.arange(len(data.images)) % 10
        number = ("train", "val", "test").index(split)
        chosen = (tenth % 5 != 4, tenth == 4, tenth == 9)[number]
        self._ink = np.round(data.images[chosen] * (255 / 16)).astype(np.uint8)
        self._digit = data.target[chosen]
        self._key = config.seed, number
        self._count, self._size = count, config.crop_size

    def __len__(self):
        return self._count

    def load(self, index):
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
        picture = Image.fromarray(self._ink[pick]).resize((side, side), Image.BICUBIC)
        picture = picture.rotate(rng.uniform(-15, 15), Image.BILINEAR)
        ink = np.asarray(picture, np.float64) / 255
        colour = rng.permutation([255, rng.uniform(130, 255), rng.uniform(60, 255)])
        y, x = quarter * half + rng.integers(0, half - side + 1, 2)
        window = np.s_[y : y + side, x : x + side]
        image[window] += ink[..., None] * (colour - image[window])
        label[window][ink > STROKE] = self._digit[pick] + 1


def _background(rng, size):
    """A dark gradient between two colours."""
    low, high = rng.uniform(0, 90, (2, 3))
    angle = rng.uniform(0, 2 * np.pi)
    y, x = np.mgrid[0:size, 0:size] / size - 0.5
    ramp = np.clip(0.5 + x * np.cos(angle) + y * np.sin(angle), 0, 1)[..., None]
    return low + ramp * (high - low)
