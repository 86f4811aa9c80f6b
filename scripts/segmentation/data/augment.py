"""Makes the square crop that the net takes out of an image of any size.

Training scales, mirrors and crops at random, validation takes the middle square, as
GluonCV's loaders do. Only the generator that is passed in draws numbers.
"""

import numpy as np
from PIL import Image

# Mean and standard deviation of ImageNet's channels, in units of 0..1.
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)


def normalized(image):
    """uint8 (height, width, 3) to float32 (3, height, width) about mean 0."""
    scaled = (image.astype(np.float32) / 255 - MEAN) / STD
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))


def scaled_to(image, label, short_side):
    """Scale so that the shorter side has `short_side` pixels."""
    scale = short_side / min(image.shape[:2])
    height, width = (max(short_side, round(side * scale)) for side in image.shape[:2])
    if image.shape[:2] == (height, width):
        return image, label
    image = Image.fromarray(image).resize((width, height), Image.BILINEAR)
    label = Image.fromarray(label).resize((width, height), Image.NEAREST)
    return np.asarray(image), np.asarray(label)


def train_view(image, label, crop, may_flip, rng, scales=(0.75, 1.25)):
    """A random square: short side = crop times a random scale, padded if too small."""
    short = max(1, round(crop * rng.uniform(*scales)))
    image, label = scaled_to(image, label, short)
    if may_flip and rng.random() < 0.5:
        image, label = image[:, ::-1], label[:, ::-1]
    down, right = (max(0, crop - side) for side in label.shape)
    if down or right:
        label = np.pad(label, ((0, down), (0, right)), constant_values=-1)
        padded = np.full((*label.shape, 3), np.round(MEAN * 255), np.uint8)
        padded[: image.shape[0], : image.shape[1]] = image
        image = padded
    y, x = (rng.integers(0, side - crop + 1) for side in label.shape)
    return image[y : y + crop, x : x + crop], label[y : y + crop, x : x + crop]


def val_view(image, label, crop):
    """The middle square, scaled to the crop."""
    image, label = scaled_to(image, label, crop)
    y, x = ((side - crop) // 2 for side in label.shape)
    return image[y : y + crop, x : x + crop], label[y : y + crop, x : x + crop]
